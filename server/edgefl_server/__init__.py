"""Coordinator, aggregator, journal, broker: the side of the federation that owns the model."""
