"""Datasets, their loaders and the partitioners that spread them over clients."""
