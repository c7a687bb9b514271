"""A large model by the broker and by a mirror: time, and memory of every process."""
