"""The reproductions by name."""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.reproduce import counterexample
from edgefl.reproduce.report import Reproduction
from edgefl.wire.errors import ConfigError

REPRODUCTIONS: Mapping[str, Reproduction] = {each.name: each for each in (counterexample.REPRODUCTION,)}


def named(name: str) -> Reproduction:
    """ConfigError, with what exists, for a wrong name."""
    if name not in REPRODUCTIONS:
        known = ", ".join(sorted(REPRODUCTIONS))
        raise ConfigError(f"no reproduction {name!r}; there are: {known}", name=name, known=known)
    return REPRODUCTIONS[name]
