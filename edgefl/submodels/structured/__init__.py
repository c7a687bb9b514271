"""FIARSE by whole channels: the most important ones of every layer form a smaller dense model (fiarse.md 8.3, R4 and R5)."""
