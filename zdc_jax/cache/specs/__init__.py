"""What a layer's cache stores, and how attention reads it; one spec for each kind."""
