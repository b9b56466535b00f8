"""Hugging Face folders: their configs, weights and the way back."""
