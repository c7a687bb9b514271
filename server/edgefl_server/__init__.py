"""Server of a federation: coordinator, aggregation, update journal, broker connection and publication of models."""
