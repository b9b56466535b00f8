"""Several devices: meshes, sequence parallelism and the bytes it moves."""
