"""The device's store: one SQLite file with all state that survives a restart."""
