"""``edgefl enroll`` and ``edgefl key``: which keys there are, and which devices are let in."""
