"""Where each node of a bundle's graphs comes from."""
