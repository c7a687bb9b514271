"""Results of cases: passed, or the expected and the found behavior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["passed", "failed", "missing", "skipped"]
"""``missing``: an optional part of the protocol that the agent lacks. ``skipped``: it means nothing for this engine."""


class CaseFailed(Exception):
    """Difference between the agent's behavior and the expected one."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}; found {found}")
        self.expected = expected
        self.found = found


def expect(holds: bool, expected: str, found: object) -> None:
    """Raise CaseFailed unless the condition ``holds``."""
    if not holds:
        raise CaseFailed(expected, str(found))


def expect_equal(what: str, expected: object, found: object) -> None:
    """Raise CaseFailed unless the two values are equal."""
    expect(found == expected, f"{what} {expected!r}", repr(found))


@dataclass(frozen=True)
class CaseResult:
    """Result of one case. ``says``: the checked behavior in one sentence; ``seconds``: its duration."""

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
        """True unless the case failed."""
        return self.outcome != "failed"
