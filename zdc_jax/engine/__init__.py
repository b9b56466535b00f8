"""Continuous batching: requests arrive at any time and share the steps of one model."""
