"""Measurements in the current process: graphs, a round, memory, energy, traces."""
