"""Training that knows its update will be binarized or sparse: FedBAT, BiFL, ZeroFL's SWAT."""
