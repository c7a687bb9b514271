"""Scalars that a server announces otherwise from exchange to exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Scalars = Mapping[str, float]

Schedule = Callable[[int, int], Scalars]
"""(position, rounds) -> scalars that the server announces for an exchange: ``position`` exchanges of this algorithm were
completed before it, ``rounds`` are planned in all."""


def constant(_position: int, _rounds: int) -> Scalars:
    """The schedule of an algorithm whose scalars stay what it says."""
    return {}
