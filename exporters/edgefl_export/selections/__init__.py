"""Selections between a value and zero, as products: where that is safe, and how each engine writes the mask."""
