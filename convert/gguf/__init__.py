"""Reading of GGUF files: headers, weights and tokenizers, in the layout of Hugging Face folders."""
