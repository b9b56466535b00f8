"""Caches whose slots lie in pages of a shared pool."""
