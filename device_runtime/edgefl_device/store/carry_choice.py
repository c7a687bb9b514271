"""Which of the carries in a store a round goes on from, and which are void with what they belonged to.

::

    choice = choose(store.carries(), RoundToBegin("run", "run/algorithm/weak", 7, base=6), exchanges=1)
    choice.carry        # the one to go on from, or None
    choice.void         # those that no round can ever go on from again, and why, for people
    choice.superseded   # those that an accepted one of a completed round took the place of
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StoredCarry:
    """A carry in the store. ``name`` is "<run>/<algorithm>/<tier>"; ``waits``: the server has not spoken on its update."""

    id: int
    name: str
    nonce: str
    round: int
    waits: bool


@dataclass(frozen=True)
class RoundToBegin:
    """``name`` is that of the round's carries ("<run>/<algorithm>/<tier>"), ``base`` the last completed round."""

    run: str
    name: str
    round: int
    base: int


@dataclass(frozen=True)
class VoidCarry:
    """A carry that is of no use any more."""

    carry: StoredCarry
    why: str


@dataclass(frozen=True)
class CarryChoice:
    """What became of the carries in a store as a round began."""

    carry: StoredCarry | None
    void: tuple[VoidCarry, ...]
    superseded: tuple[StoredCarry, ...]


def choose(carries: Sequence[StoredCarry], begun: RoundToBegin, exchanges: int) -> CarryChoice:
    """Judge ``carries``, oldest first, for a round; one is good for ``exchanges`` completed rounds (0: for all).

    The newest of a completed round is taken. Those before it are superseded as far as no rejection can bring them back.
    """
    void = [
        VoidCarry(carry, f"it belongs to another run, {begun.run} goes on now")
        for carry in foreign(carries, begun.run)
    ]
    own = [carry for carry in carries if carry.name == begun.name]
    lost = abandoned(own, begun.base, None)
    void += [VoidCarry(carry, f"round {carry.round} was abandoned") for carry in lost]
    valid = [carry for carry in own if carry not in lost]
    if valid and (why := _too_old(valid[-1], begun.base, exchanges)):
        return CarryChoice(None, (*void, VoidCarry(valid[-1], why)), tuple(valid[:-1]))
    settled = [place for place, carry in enumerate(valid) if not carry.waits]
    superseded = tuple(valid[: settled[-1]]) if settled else ()
    return CarryChoice(valid[-1] if valid else None, tuple(void), superseded)


def foreign(carries: Sequence[StoredCarry], run: str) -> list[StoredCarry]:
    """Those of other runs: nothing ever asks for them again."""
    return [carry for carry in carries if not carry.name.startswith(f"{run}/")]


def abandoned(carries: Sequence[StoredCarry], base: int, before: int | None) -> list[StoredCarry]:
    """Those of rounds after the last completed one, ``base``; with ``before``, of rounds before that one only."""
    return [carry for carry in carries if carry.round > base and (before is None or carry.round < before)]


def _too_old(carry: StoredCarry, base: int, exchanges: int) -> str:
    """Why the carry is not good any more, if so."""
    if not exchanges or base - carry.round < exchanges:
        return ""
    return f"it was good for {exchanges} completed round{'s' * (exchanges > 1)} after it, and round {base} is completed"
