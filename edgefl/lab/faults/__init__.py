"""Deliberate faults: bad links, killed processes, full disks and jumping clocks, as a repeatable schedule."""
