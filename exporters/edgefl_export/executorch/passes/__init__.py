"""Rewrites of a whole graph before it is lowered."""
