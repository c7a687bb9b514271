"""The one shape of a submodel: which entries of which global tensors a tier holds, and how they travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from edgefl.wire.regions import Placement
from edgefl.wire.tensors import Array

if TYPE_CHECKING:
    from torch import nn

    from edgefl.contract.tensors import TensorSpec
    from edgefl.models.spec import ModelSpec
    from edgefl.objective.carrier import Carrier


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive frozen units that are fetched, run forward over the local data and dropped together.

    Behind them in ``units`` stand later ones, which hold tensors that these read too.
    """

    units: tuple[str, ...]
    module: nn.Sequential
    # One row of what the chunk reads, and of what it leaves behind; no batch dimension.
    sample: TensorSpec
    result: TensorSpec


class Submodel(Protocol):
    """What a tier holds and trains, of whichever kind."""

    @property
    def kind(self) -> str:
        """The kind's name, as federation files have it."""
        ...

    @property
    def spec(self) -> ModelSpec:
        """The global model."""
        ...

    @property
    def suffix(self) -> nn.Sequential:
        """The trained units, in local shapes, under global names."""
        ...

    @property
    def boundary(self) -> TensorSpec:
        """One sample of what ``suffix`` reads, without the batch dimension."""
        ...

    @property
    def carrier(self) -> Carrier | None:
        """How the suffix's tensors travel and act; None: as they are."""
        ...

    @property
    def prefix(self) -> tuple[Chunk, ...]:
        """Units that are run forward, frozen, before training; empty where the whole depth is trained."""
        ...

    @property
    def units(self) -> tuple[str, ...]:
        """The units of the global model whose weights training reads whole; empty if the devices get a payload."""
        ...

    @property
    def moves(self) -> bool:
        """Whether the tier may hold other entries in each round, so that a device keeps nothing per entry."""
        ...

    @property
    def identity(self) -> Mapping[str, object]:
        """All that decides the tier's graphs, beside the model, in types that JSON knows."""
        ...

    def place(self, weights: Mapping[str, Array], number: int) -> Placement:
        """The tier's share of ``weights`` (float arrays by global name) in round ``number``, counted from 1.

        A pure function: the same weights and number give the same bytes.
        """
        ...
