"""Architectures that were written down before any of them was tried: what a stranger's model meets."""
