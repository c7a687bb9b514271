"""Python state of models."""
