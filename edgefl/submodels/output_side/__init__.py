"""EmbracingFL: the units behind a cut are trained; cost of such a tier."""
