"""Text generation over a compressed KV cache."""
