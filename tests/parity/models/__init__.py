"""Models of every kind, their inputs and their losses, beside torch on each engine."""
