"""The `zdc` command."""
