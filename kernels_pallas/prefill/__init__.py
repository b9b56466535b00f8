"""Attention of prompts to keys in 16 bits."""
