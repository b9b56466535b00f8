"""The subcommands of `zdc`, one file each, and the flags that they share."""
