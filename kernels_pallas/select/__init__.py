"""Choice of the tokens or blocks that attention reads."""
