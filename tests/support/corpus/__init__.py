"""Modules as people write them, one trap each: behaviour of torch that a compiler can lose in silence."""

from __future__ import annotations

from tests.support.case import Case
from tests.support.corpus import (
    gradients,
    hooks,
    layers,
    losses,
    modes,
    numbers,
    reuse,
    state,
    surroundings,
    unusual,
    wrapped,
)

CASES: tuple[Case, ...] = tuple(
    case
    for file in (
        modes,
        losses,
        state,
        hooks,
        layers,
        reuse,
        gradients,
        numbers,
        wrapped,
        unusual,
        surroundings,
    )
    for case in file.CASES
)

if len({case.name for case in CASES}) != len(CASES):
    raise ValueError("two cases of the corpus have one name")
