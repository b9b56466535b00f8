"""Specs of a layer's cache: what each kind stores, and how attention reads it."""
