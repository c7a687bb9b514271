"""Layers of the models in this package: recurrent cells and stacks, norms, log-mel features, initial values."""
