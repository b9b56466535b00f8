"""Rotary embedding with a basis, and the scores of keys that left out their mean."""
