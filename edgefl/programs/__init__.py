"""Local algorithms as pure functions of named tensors."""
