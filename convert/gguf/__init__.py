"""GGUF files: their headers, weights and tokenizers, as a Hugging Face folder would have them."""
