"""Conversion, calibration and plan search, which make folders for `zdc_jax.load`; the `zdc` command."""
