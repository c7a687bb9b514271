"""Interface of submodels: the entries of global tensors that a tier holds, and their transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from edgefl.wire.regions import Placement
from edgefl.wire.tensors import Array

if TYPE_CHECKING:
    from torch import nn

    from edgefl.contract.tensors import TensorSpec
    from edgefl.models.spec import ModelSpec
    from edgefl.objective.carrier import Carrier


@dataclass(frozen=True, eq=False)
class FrozenUnits:
    """Consecutive frozen units that are fetched, run forward over the local data and dropped together.

    ``units`` are units with weights, followed by later ones that hold tensors these read too.
    """

    units: tuple[str, ...]
    module: nn.Sequential
    # One row of what the chunk reads, and of what it leaves behind; no batch dimension.
    sample: TensorSpec
    result: TensorSpec


class Submodel(ABC):
    """Part of the global model ``spec`` that a tier holds and trains; by default the whole model."""

    spec: ModelSpec
    kind: ClassVar[str]
    """Name of the kind in federation files."""

    @property
    def suffix(self) -> nn.Sequential:
        """Trained units, in local shapes, under global names."""
        return self.spec.module

    @property
    def boundary(self) -> TensorSpec:
        """One sample of the input of ``suffix``, without the batch dimension."""
        return self.spec.sample

    @property
    def carrier(self) -> Carrier | None:
        """Transport and use of the suffix's tensors. None: unchanged."""
        return None

    @property
    def prefix(self) -> tuple[FrozenUnits, ...]:
        """Units that are run forward, frozen, before training; empty if the whole depth is trained."""
        return ()

    @property
    def units(self) -> tuple[str, ...]:
        """Units of the global model whose weights training reads whole; empty if the devices get a payload."""
        return ()

    @property
    def moves(self) -> bool:
        """True if the tier may hold other entries in each round, so that a device cannot keep state per entry."""
        return False

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, object]:
        """All settings that decide the tier's graphs, besides the model, in JSON types."""

    @abstractmethod
    def place(self, weights: Mapping[str, Array], number: int) -> Placement:
        """Return the tier's share of ``weights`` (float arrays by global name) in round ``number``, counted from 1.

        A pure function: the same weights and number give the same bytes.
        """


def units_with_tensors(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the units of ``module`` that have parameters or buffers."""
    return tuple(name for name, unit in module.named_children() if unit.state_dict())
