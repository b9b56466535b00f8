"""From a Hugging Face folder to a calibrated folder that `zdc_jax.load` reads, and the `zdc` command."""
