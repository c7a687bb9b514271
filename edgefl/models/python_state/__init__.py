"""Python state that a model's code can read or change: its containers, a search for them, and snapshots."""
