"""Which of the carries in a store a round goes on from, and which are gone with what they belonged to.

::

    choice = standing(store.carries(), mine, exchanges=1)
    choice.found        # the carry that stands, if one does
    choice.gone         # those that can never stand again, and why, for people
    choice.superseded   # those that an accepted one of a completed round took the place of
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from device_runtime.store.carry import UNKNOWN, Kept


@dataclass(frozen=True)
class Mine:
    """The round that begins: ``name`` is that of its carries ("<run>/<program>/<tier>"), ``base`` the last completed
    round (-1: the server does not say)."""

    run: str
    name: str
    round: int
    base: int


@dataclass(frozen=True)
class Gone:
    """A carry that is of no use any more."""

    kept: Kept
    why: str


@dataclass(frozen=True)
class Standing:
    """What became of the carries in a store as a round began."""

    found: Kept | None
    gone: tuple[Gone, ...]
    superseded: tuple[Kept, ...]


def standing(kept: Sequence[Kept], mine: Mine, exchanges: int) -> Standing:
    """Judge ``kept``, oldest first, for the round ``mine``; a carry is good for ``exchanges`` completed rounds (0: for all).

    The newest of a completed round stands. Those before it are superseded as far as no rejection can bring them back.
    """
    gone = [
        Gone(row, f"it belongs to another run, {mine.run} goes on now") for row in foreign(kept, mine.run)
    ]
    own = [row for row in kept if row.name == mine.name]
    void = abandoned(own, mine.base, None)
    gone += [Gone(row, f"round {row.round} was abandoned") for row in void]
    valid = [row for row in own if row not in void]
    if valid and (why := _too_old(valid[-1], mine.base, exchanges)):
        return Standing(None, (*gone, Gone(valid[-1], why)), tuple(valid[:-1]))
    settled = [place for place, row in enumerate(valid) if not row.waits]
    return Standing(valid[-1] if valid else None, tuple(gone), tuple(valid[: settled[-1]] if settled else ()))


def foreign(kept: Sequence[Kept], run: str) -> list[Kept]:
    """Those of other runs: nothing ever asks for them again."""
    return [row for row in kept if not row.name.startswith(f"{run}/")]


def abandoned(kept: Sequence[Kept], base: int, before: int | None) -> list[Kept]:
    """Those of rounds after the last completed one, ``base``; with ``before``, of rounds before that one only."""
    if base < 0:
        return []
    return [row for row in kept if row.round > base and (before is None or row.round < before)]


def _too_old(row: Kept, base: int, exchanges: int) -> str:
    """Why the carry is not good any more, if so."""
    if not exchanges or base < 0 or (row.round != UNKNOWN and base - row.round < exchanges):
        return ""
    if row.round == UNKNOWN:
        return "it does not say of which round it is"
    return f"it was good for {exchanges} completed round{'s' * (exchanges > 1)} after it, and round {base} is completed"
