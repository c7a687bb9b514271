"""EmbracingFL's phone table on this machine's engines."""
