"""Which dimensions of a model's tensors hang together, found from the operations that it runs, and slices of them."""
