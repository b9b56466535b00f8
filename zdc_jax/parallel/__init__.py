"""Models on several devices: meshes, sequence parallelism, tensor parallelism and communication volume."""
