"""Offline evaluation of a plan compared with the unmodified model: perplexity and long-context tasks."""
