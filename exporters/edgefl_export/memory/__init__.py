"""The memory of a graph: used, predicted, and traded for time by recomputation."""
