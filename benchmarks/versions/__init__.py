"""Rounds that wait beside versions that do not, where a third of the devices is slow."""
