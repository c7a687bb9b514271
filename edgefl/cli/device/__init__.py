"""``edgefl device``, and other commands that run on a device. Never imports torch."""
