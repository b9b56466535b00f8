"""Tool calls in the text of a reply, read while the model writes them."""
