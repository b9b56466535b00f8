"""Attention of new tokens to keys in 16 bits, and the merge of partial results."""
