"""EmbracingFL: the units behind a cut are trained."""
