"""What a reproduction gives back: every number beside the one it should be, and charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Compared:
    """A number that was measured. ``expected`` is None where there is only an ordering to hold: see ``agrees``."""

    run: str
    quantity: str
    found: float
    expected: float | None
    agrees: bool


@dataclass(frozen=True)
class ReproductionReport:
    """``charts``: SVG text by file name. ``note``: how the numbers were made."""

    rows: tuple[Compared, ...]
    charts: Mapping[str, str]
    note: str

    @property
    def agrees(self) -> bool:
        return all(row.agrees for row in self.rows)


Runner = Callable[[int | None, Callable[[str], None]], ReproductionReport]


@dataclass(frozen=True)
class Reproduction:
    """``run(steps, progress)``: ``steps`` bounds every run (None: as long as its numbers need); ``progress`` hears what
    runs. ``quick``: the same, smaller, where that is worth having."""

    name: str
    what: str
    run: Runner
    quick: Runner | None = None


def near(run: str, quantity: str, found: float, expected: float, tolerance: float) -> Compared:
    """Agrees within ``tolerance``, absolute."""
    return Compared(run, quantity, found, expected, abs(found - expected) <= tolerance)


def holds(run: str, quantity: str, found: float, truth: bool) -> Compared:
    """An ordering, or a bound."""
    return Compared(run, quantity, found, None, truth)
