"""The baselines: SGD and AdamW, FedAvg, FedProx, SCAFFOLD, Mime, and training without a federation."""
