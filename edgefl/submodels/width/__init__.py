"""Width slices: HeteroFL, FedRolex and FjORD."""
