"""A training step in a browser beside the same step of Python's agent."""
