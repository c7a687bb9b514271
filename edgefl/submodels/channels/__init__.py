"""Channel analysis by tracing: dimensions of a model's tensors that must be cut together, and slices."""
