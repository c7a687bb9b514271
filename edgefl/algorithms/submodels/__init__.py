"""Training that belongs to a submodel type: FIARSE's TCB-GD, early exits, the frozen forward pass."""
