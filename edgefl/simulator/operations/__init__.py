"""Recorded lists of operations made shorter: the same values to rounding, in less time."""
