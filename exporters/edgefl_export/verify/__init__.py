"""Exported graphs beside torch, and how far rounding alone explains a difference."""
