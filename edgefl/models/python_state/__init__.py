"""Python state that a model's code can read or change: where it is, a search for it, and snapshots of it."""
