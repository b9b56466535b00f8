"""Continuous batching: requests come at any time, and share the steps of one model."""
