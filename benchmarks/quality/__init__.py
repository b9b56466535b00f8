"""Quality of cache methods on a real model, at equal bytes."""
