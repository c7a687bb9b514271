"""The reproductions by name: those that run in torch. What runs on a device's engines is measured by `edgefl.bench`."""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.analysis.reproduce import counterexample
from edgefl.analysis.reproduce.report import Reproduction
from edgefl.wire.errors import ConfigError

REPRODUCTIONS: Mapping[str, Reproduction] = {each.name: each for each in (counterexample.REPRODUCTION,)}


def named(name: str, among: Mapping[str, Reproduction] = REPRODUCTIONS) -> Reproduction:
    """ConfigError, with what exists, for a wrong name."""
    if name not in among:
        known = ", ".join(sorted(among))
        raise ConfigError(f"no reproduction {name!r}; there are: {known}", name=name, known=known)
    return among[name]
