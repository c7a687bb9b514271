"""Measurements of one process: graphs, a round, memory, energy, traces."""
