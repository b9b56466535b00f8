"""Offline planning: predicting, measuring and choosing plans. Serving does not import this package."""
