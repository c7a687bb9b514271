"""Modules as people write them, one kind of trap each: what of torch's behaviour a compiler can lose in silence."""

from __future__ import annotations

from tests.support.case import Case
from tests.support.corpus import modes

CASES: tuple[Case, ...] = tuple(modes.CASES)

assert len({case.name for case in CASES}) == len(CASES)
