"""Passes that shorten recorded lists of operations: the same values to rounding, in less time."""
