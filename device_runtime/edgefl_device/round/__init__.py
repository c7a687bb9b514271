"""One round on the device: job, graphs, feeds, forward pass, training."""
