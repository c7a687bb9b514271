"""Workers that take the updates of a part of the devices each: own assembly, checks, journal rows, and sums that merge."""
