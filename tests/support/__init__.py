"""Independent judge of compiled training, with its corpus and generator of modules."""
