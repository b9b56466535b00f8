"""Measuring a plan against the unmodified model, offline: perplexity, and tasks over long ranges."""
