"""Per-FedAvg, and algorithms with layers that stay on each device."""
