"""The device's store: blobs, checkpoints and carry in one SQLite file."""
