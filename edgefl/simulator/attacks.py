"""What dishonest clients of a simulation send in place of what they trained, to see what a federation stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from edgefl.config.simulation import SimulationTable
from edgefl.wire.errors import ConfigError
from edgefl.wire.regions import Region, extract
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import VALUE_LIMIT, Form


@dataclass(frozen=True)
class Attack:
    """By the clients that ``table`` calls hostile. Each sends an update that passes every check of its form."""

    table: SimulationTable

    def by(self, client: str) -> bool:
        """Whether it is one of them."""
        return any(fnmatchcase(client, pattern) for pattern in self.table.hostile)

    def sent(
        self, update: Arrays, weights: Mapping[str, Array], regions: Mapping[str, Region], form: Form
    ) -> Arrays:
        """In place of ``update``, which began from the model's ``weights``, of which it holds ``regions``.

        ConfigError for an update of codes or changes, which would have to be coded again.
        """
        if form.sections or form.change:
            raise ConfigError(
                f"simulation.hostile clients send weights, and codec {form.codec!r} sends codes: set codec.name to 'dense'",
                codec=form.codec,
            )
        base = extract(weights, regions)
        if self.table.attack == "flip":
            return {
                name: _flipped(base[name], trained, self.table.strength) for name, trained in update.items()
            }
        return {name: _ruined(name, array) for name, array in update.items()}


def _flipped(base: Array, trained: Array, strength: float) -> Array:
    """The change, turned round and so many times as long."""
    away = base - np.float32(strength) * (trained - base)
    return np.clip(away, -VALUE_LIMIT, VALUE_LIMIT).astype(trained.dtype)


def _ruined(name: str, array: Array) -> Array:
    """Statistics that no norm counts, as far as the checks of an update let them be."""
    kind = name.rpartition(".")[2]
    if kind not in ("running_mean", "running_var"):
        return array
    return np.full_like(array, -VALUE_LIMIT if kind == "running_var" else VALUE_LIMIT)
