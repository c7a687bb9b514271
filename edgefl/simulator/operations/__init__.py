"""Passes that shorten recorded lists of operations. They compute the same values up to rounding, in less time."""
