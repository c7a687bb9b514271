"""Layers of the zoo's models: recurrent cells and stacks, norms, log-mel features, and their initial values."""
