"""``edgefl conformance``: whether an agent does what the protocol says."""
