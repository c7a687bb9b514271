"""Faults on purpose: bad links, killed processes, full disks and jumping clocks, as a schedule that can be run again."""
