"""What one measured process does: graphs, a round, memory, energy, traces."""
