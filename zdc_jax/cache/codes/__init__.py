"""Quantizations of keys and values."""
