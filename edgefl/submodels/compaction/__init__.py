"""Exact compaction of a trained mask: the channels that it emptied leave the network (fiarse.md 8.3, R3)."""
