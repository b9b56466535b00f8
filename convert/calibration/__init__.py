"""Calibration: moments of text, and the basis and the profile of a converted folder."""
