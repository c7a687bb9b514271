"""``edgefl bench``: measure on this machine."""
