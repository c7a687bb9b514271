"""Traced forwards: the graph of a module, where it can be cut, and its stretches as modules."""
