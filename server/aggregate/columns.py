"""How a block is written down: what all loops over blocks agree on, also where none is compiled yet.

After a change of this file, delete the ``__pycache__`` folder of the server (:mod:`server.aggregate.native` says why).
"""

BLOCK = 4096
"""Most entries of a block: its sums and its clients' bits stay in the processor's cache. A multiple of 8."""

FIRST, LENGTH, SOURCE, ROW, TARGET = range(5)
"""Columns of a block: its first bit (codes, masks) or element (floats) in its array, entries, number of its array, row of
its scale, and first entry in the model; ``layout.size + i`` stands for the positions from ``index[i]`` on."""
