"""Reading of Hugging Face folders, and export to them."""
