"""What is said of an agent: a case that it passed, or what was expected and what came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["passed", "failed", "missing", "skipped"]
"""``missing``: an optional part of the protocol that the agent lacks. ``skipped``: it means nothing for this engine."""


class Failed(Exception):
    """The agent did something else than the case expects."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}; found {found}")
        self.expected = expected
        self.found = found


def expect(holds: bool, expected: str, found: object) -> None:
    """Failed unless it ``holds``."""
    if not holds:
        raise Failed(expected, str(found))


def expect_equal(what: str, expected: object, found: object) -> None:
    """Failed unless the two are equal."""
    expect(found == expected, f"{what} {expected!r}", repr(found))


@dataclass(frozen=True)
class Verdict:
    """Of one case. ``says``: what it checks, in one sentence. ``seconds`` that it took."""

    name: str
    group: str
    says: str
    outcome: Outcome
    optional: bool = False
    expected: str = ""
    found: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether an agent may be called right with it."""
        return self.outcome != "failed"
