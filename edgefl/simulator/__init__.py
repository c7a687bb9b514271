"""Simulation of a whole federation without a broker: the server's own rounds, with clients trained in torch."""
