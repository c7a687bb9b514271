"""EmbracingFL: the units behind a cut are trained; and what such a tier costs."""
