"""FIARSE: a tier holds the entries of largest magnitude; thresholds, guards against dead submodels."""
