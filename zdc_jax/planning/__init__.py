"""Offline: what plans cost, which plan to take, and how to measure it. Serving imports none of this."""
