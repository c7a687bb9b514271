"""The environment that make works in."""
