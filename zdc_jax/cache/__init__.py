"""How layers keep keys and values: one interface, one file a method."""
