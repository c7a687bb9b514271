"""Format of the statistics of batch norm that devices measure: names and fixed-point numbers."""

from __future__ import annotations

NORMS = "norms"
"""Name of the exchange, and of the server's state that holds the statistics: ``norms/<family>.<buffer>``."""
WHOLE = "@whole"
"""Family of all tiers that evaluate the whole model: those of output-side layers. Other tiers are families of their own."""
ROWS = "rows"
"""Name of the reported number of rows."""
MEASURED = "measured"
"""Name of the entry of a family that has the number of training rounds of the measured model; -1 before the first one."""
NORM_BITS = 24
"""Binary fraction digits of a reported mean or deviation: the whole number nearest to its value times 2^24."""
NORM_LIMIT = 1 << 61
"""Magnitude of a reported number that stands for a value that is larger or not finite. Servers refuse it."""


def tier_family(tier: str) -> str:
    """Return the name under which the batch-norm statistics of ``tier`` are published: the tier's name with "@" for
    each dot.

    A dot would end the name of the published unit (:func:`unit_of`).
    """
    return tier.replace(".", "@")


def unit_of(family: str) -> str:
    """Return the name under which the server publishes the batch-norm statistics of ``family`` (:func:`tier_family`)."""
    return f"{NORMS}/{family}"
