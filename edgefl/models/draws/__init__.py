"""Random numbers that a model draws in training, as inputs of its graphs."""
