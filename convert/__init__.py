"""From a Hugging Face folder or GGUF file to a calibrated folder for `zdc_jax.load`; the `zdc` command."""
