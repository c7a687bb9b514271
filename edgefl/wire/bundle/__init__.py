"""Bundles: manifest, archive, signature, origins of the graphs' nodes, and measured profiles."""
