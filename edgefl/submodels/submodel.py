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
    """Consecutive frozen units (stages of the model) that a device downloads, runs forward over its local data and
    drops together: a chunk.

    Attributes:
        units: Names of the units with weights, followed by later units that hold tensors which these units read
            too.
        module: The units.
        sample: Spec of one sample of their input.
        result: Spec of one sample of their output.
    """

    units: tuple[str, ...]
    module: nn.Sequential
    # One row of the chunk's input and of its output, without batch dimension.
    sample: TensorSpec
    result: TensorSpec


class Submodel(ABC):
    """Part of the global model ``spec`` that a tier holds and trains. The defaults describe the whole model.

    A unit is a stage of the model that is never split. The tier trains the units :attr:`suffix`, and may run the
    frozen units :attr:`prefix` before them.
    """

    spec: ModelSpec
    kind: ClassVar[str]
    """Name of the kind in federation files."""

    @property
    def suffix(self) -> nn.Sequential:
        """Trained units (stages of the model), in the tier's shapes, under their global names."""
        return self.spec.module

    @property
    def boundary(self) -> TensorSpec:
        """Spec of one sample of the input of the trained units (:attr:`suffix`), without the batch dimension."""
        return self.spec.sample

    @property
    def carrier(self) -> Carrier | None:
        """Conversion between the tensors that a device receives, trains and sends.

        None: the tensors of the trained units (:attr:`suffix`) are sent and received unchanged.
        """
        return None

    @property
    def prefix(self) -> tuple[FrozenUnits, ...]:
        """Chunks (consecutive runs) of the frozen units (stages of the model) that run before training.

        Empty if all units are trained.
        """
        return ()

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units (stages of the model) whose published weights the device downloads for training.

        Empty if it downloads a payload instead: arrays that only devices of this tier receive.
        """
        return ()

    @property
    def moves(self) -> bool:
        """True if the tier may hold other entries in each round. Then a device cannot keep state per entry."""
        return False

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, object]:
        """All settings, besides the model, that decide the tier's graphs, in JSON types.

        Equal identities share a bundle.
        """

    @abstractmethod
    def place(self, weights: Mapping[str, Array], number: int) -> Placement:
        """Return the part of the global weights that the tier holds in round ``number``, counted from 1.

        The result has the region of each tensor and the payload: arrays that only devices of this tier receive. The
        function is pure: the same arguments give the same bytes.

        Args:
            weights: Global weights, float arrays by name.
            number: Number of the round.
        """


def units_with_tensors(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the units (stages of the model) of ``module`` that have parameters or buffers."""
    return tuple(name for name, unit in module.named_children() if unit.state_dict())
