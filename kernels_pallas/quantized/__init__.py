"""Quantized keys and values: writing them, attention to them, and reading them for other kernels."""
