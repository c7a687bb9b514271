"""Durable state that survives ``kill -9``: journal, checkpoints, published bytes."""
