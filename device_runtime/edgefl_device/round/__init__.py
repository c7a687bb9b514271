"""One round on the device: job, graphs, inputs, forward pass, training."""
