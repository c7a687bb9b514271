"""Per-FedAvg, and the step that adapts a model to one user."""
