"""An engine in a process of its own, which may little: its crash costs an attempt at a round, and no more."""
