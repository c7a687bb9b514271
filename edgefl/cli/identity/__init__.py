"""``edgefl enroll`` and ``edgefl key``: keys, and the list of devices that may join."""
