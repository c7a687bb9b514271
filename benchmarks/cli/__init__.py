"""``python -m benchmarks``: measure on this machine."""
