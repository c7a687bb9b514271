"""Training for binarized or sparse updates: FedBAT, BiFL, ZeroFL's SWAT."""
