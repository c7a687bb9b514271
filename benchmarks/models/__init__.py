"""Architectures that others wrote: each exported, trained by each engine and compared with torch."""
