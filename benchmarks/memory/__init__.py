"""Peak memory of a device agent in training."""
