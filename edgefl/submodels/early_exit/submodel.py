"""ScaleFL: a tier holds the units up to one of the model's exits, and of those the leading channels (fiarse.md 3)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from edgefl.errors import ModelError
from edgefl.models.exits import BranchedUnits, ExitSpec, branched
from edgefl.models.spec import ModelSpec, sequential
from edgefl.submodels.channels.narrow import channels_of
from edgefl.submodels.importance.maskable import maskable
from edgefl.submodels.submodel import Submodel, units_with_tensors
from edgefl.submodels.width.submodel import Rounding, Width
from edgefl.wire.regions import Placement, Region, extract, local_shape
from edgefl.wire.tensors import Array

_LEVEL = "level"


class _Joint(BranchedUnits):
    """All exits in every mode, so that whoever follows the model's operations sees each exit read its features."""

    def forward(self, x: Tensor) -> Tensor:
        return self.all_exits(x)


def branching(spec: ModelSpec) -> ExitSpec:
    """``spec``; ModelError, with how to come by one, if it is no model with exits."""
    if isinstance(spec, ExitSpec):
        return spec
    raise ModelError(
        f"{spec.name} has no early exits: give it some by edgefl.models.exits.with_exits, or in a federation file by "
        f'model.name = "edgefl.models.exits:early_exits" with options.base = "{spec.name}"',
        model=spec.name,
    )


@dataclass(frozen=True, eq=False)
class EarlyExit(Submodel):
    """The units of ``spec`` up to its exit ``exit`` (counted from 1, the model's own head is the last), trained on all
    the exits in them; of each layer the leading ``width`` of the channels, as :class:`edgefl.submodels.width.submodel.Width`
    keeps them. The level is evaluated at its last exit.

    At full width devices read the model's units, as output sides do; a narrower level has a payload of its own.
    """

    kind = "early_exit"
    spec: ExitSpec
    exit: int
    width: float = 1.0
    rounding: Rounding = "ceil"

    def __post_init__(self) -> None:
        branching(self.spec)
        _ = self._sliced if self.width != 1.0 else self._whole

    @property
    def identity(self) -> Mapping[str, object]:
        return {
            "kind": self.kind,
            "exit": self.exit,
            "width": self.width,
            "rounding": self.rounding,
            "exits": self.spec.exits,
        }

    @cached_property
    def suffix(self) -> nn.Sequential:
        """Units up to the exit; training has an output of every exit (:class:`edgefl.models.exits.BranchedUnits`)."""
        if self.width == 1.0:
            return self._whole
        narrow = self._sliced.suffix.get_submodule(_LEVEL)
        return branched(list(narrow.named_children())).train(self._whole.training)

    @cached_property
    def units(self) -> tuple[str, ...]:
        """At full width the units with weights; none otherwise."""
        return units_with_tensors(self._whole) if self.width == 1.0 else ()

    @cached_property
    def regions(self) -> Mapping[str, Region]:
        """Per state tensor of the level, the part that is held; the same in every round."""
        if self.width == 1.0:
            return dict.fromkeys(self._whole.state_dict())
        return {name.removeprefix(f"{_LEVEL}."): region for name, region in self._sliced.regions().items()}

    def place(self, weights: Mapping[str, Array], number: int) -> Placement:
        """The level's part of ``weights``; the number of the round has no say."""
        return Placement(self.regions, extract(weights, self.regions) if self.width != 1.0 else {})

    @cached_property
    def share(self) -> float:
        """Fraction of the model's maskable entries (fiarse.md 2.9) that the level holds, in (0, 1].

        The exits that were added count neither here nor there, as the spec has it: they are less than a percent.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in self.spec.weights.items()}
        counted = [name for name in maskable(self.spec) if name.partition(".")[0] not in self.spec.exits]
        local_shapes = (
            local_shape(name, self.regions[name], shapes) for name in counted if name in self.regions
        )
        return sum(map(math.prod, local_shapes)) / sum(math.prod(shapes[name]) for name in counted)

    @cached_property
    def widest(self) -> int:
        """Channels of the level's widest layer at full width: widths k / widest are all there are."""
        return max((atom.size for atom in channels_of(self._joint).cut()), default=1)

    @cached_property
    def _whole(self) -> BranchedUnits:
        """The level at full width."""
        return self.spec.level(self.exit)

    @cached_property
    def _sliced(self) -> Width:
        return Width(self._joint, self.width, self.rounding)

    @cached_property
    def _joint(self) -> ModelSpec:
        """The level as a model of one unit, whose output is that of all exits."""
        units = _Joint(OrderedDict(self._whole.named_children()))
        return ModelSpec(
            self.spec.name,
            sequential([(_LEVEL, units)]),
            self.spec.sample,
            self.spec.classes,
            loss=self.spec.loss,
        )
