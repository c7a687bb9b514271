"""Functions of torch that are rewritten in training."""
