"""Serving under load."""
