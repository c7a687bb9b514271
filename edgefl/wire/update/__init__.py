"""Encoding of updates: their layout, their size, and a reference decoder."""
