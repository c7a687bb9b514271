"""Algorithms for particular submodel types: FIARSE's TCB-GD, early exits, the frozen forward pass."""
