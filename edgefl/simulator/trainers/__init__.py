"""Trainers of the clients of a simulated round: this process, several that share its data, or actors on a Ray cluster."""
