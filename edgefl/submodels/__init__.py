"""Which entries of the global model a tier holds: output-side suffixes and width slices."""
