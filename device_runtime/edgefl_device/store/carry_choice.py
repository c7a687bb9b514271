"""Choice of the carry from which a round continues, and of those that are void.

::

    choice = choose(store.carries(), RoundToBegin("run", "run/algorithm/weak", 7, base=6), exchanges=1)
    choice.carry        # the one to continue from, or None
    choice.void         # those that no round can continue from again, and the reasons
    choice.superseded   # those that an accepted one of a completed round took the place of
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StoredCarry:
    """Carry in the store. ``name`` is "<run>/<algorithm>/<tier>"; ``waits``: its update was not acknowledged yet."""

    id: int
    name: str
    nonce: str
    round: int
    waits: bool


@dataclass(frozen=True)
class RoundToBegin:
    """Round to choose a carry for. ``name`` is the name of its carries, ``base`` the last completed round."""

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
    """Decision about the carries in a store as a round begins."""

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
    """Return the carries of other runs: no round ever reads them again."""
    return [carry for carry in carries if not carry.name.startswith(f"{run}/")]


def abandoned(carries: Sequence[StoredCarry], base: int, before: int | None) -> list[StoredCarry]:
    """Return the carries of rounds after the last completed one, ``base``; with ``before``, of rounds before that one
    only."""
    return [carry for carry in carries if carry.round > base and (before is None or carry.round < before)]


def _too_old(carry: StoredCarry, base: int, exchanges: int) -> str:
    """Return why the carry has expired; "" if it is valid."""
    if not exchanges or base - carry.round < exchanges:
        return ""
    return f"it was good for {exchanges} completed round{'s' * (exchanges > 1)} after it, and round {base} is completed"
