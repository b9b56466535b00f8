"""KV caches: one interface for the cache of a layer, and one file per kind of spec."""
