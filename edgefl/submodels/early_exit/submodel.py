"""ScaleFL: a tier holds the units up to one of the model's exits, and of those the leading channels (fiarse.md 3)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from edgefl.errors import ModelError
from edgefl.models.exits import BranchedUnits, ExitSpec, branch
from edgefl.models.spec import ModelSpec, sequential
from edgefl.submodels.channels.narrow import channels_of
from edgefl.submodels.importance.strategy import maskable
from edgefl.submodels.submodel import Submodel, units_with_tensors
from edgefl.submodels.width.submodel import Rounding, Width
from edgefl.wire.regions import Placement, Region, extract, local_shape
from edgefl.wire.tensors import Array

_LEVEL = "level"


class _AllExits(BranchedUnits):
    """Branched units (stages of the model) that run all exits in every mode, so that a trace sees each exit read its
    features.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.all_exits(x)


def require_exits(spec: ModelSpec) -> ExitSpec:
    """Return ``spec`` if it is a model with early exits.

    Raises:
        ModelError: The model has none. The text says how to add some.
    """
    if isinstance(spec, ExitSpec):
        return spec
    raise ModelError(
        f"{spec.name} has no early exits: give it some by edgefl.models.exits.with_exits, or in a federation file by "
        f'model.name = "edgefl.models.exits:early_exits" with options.base = "{spec.name}"',
        model=spec.name,
    )


@dataclass(frozen=True, eq=False)
class EarlyExit(Submodel):
    """Units of ``spec`` up to an exit (the tier's level), trained on all exits among them, evaluated at the last one.

    At full width devices download the model's units (stages of the model), as output sides do. At a smaller width they
    download a payload: arrays that only this tier receives.

    Attributes:
        exit: Number of the exit, from 1. The model's own head is the last.
        width: Share of each layer's channels. The first ones are kept, as in
            :class:`edgefl.submodels.width.submodel.Width`.
        rounding: Rounding of the number of channels.
    """

    kind = "early_exit"
    spec: ExitSpec
    exit: int
    width: float = 1.0
    rounding: Rounding = "ceil"

    def __post_init__(self) -> None:
        require_exits(self.spec)
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
        """Trained part of the model: all units from the first one up to the exit, as one module.

        Training uses every exit among them (:class:`edgefl.models.exits.BranchedUnits`).
        """
        if self.width == 1.0:
            return self._whole
        narrow = self._sliced.suffix.get_submodule(_LEVEL)
        return branch(list(narrow.named_children())).train(self._whole.training)

    @cached_property
    def units(self) -> tuple[str, ...]:
        """Names of the units (stages of the model) with weights at full width; empty for a smaller width."""
        return units_with_tensors(self._whole) if self.width == 1.0 else ()

    @cached_property
    def regions(self) -> Mapping[str, Region]:
        """Held part of each state tensor of the level (units up to the exit), by its global name, the same in every
        round.
        """
        if self.width == 1.0:
            return dict.fromkeys(self._whole.state_dict())
        return {name.removeprefix(f"{_LEVEL}."): region for name, region in self._sliced.regions().items()}

    def place(self, weights: Mapping[str, Array], number: int) -> Placement:
        """Return the regions (positions in the global ``weights``) of the level's tensors, and their values as the
        payload.

        The payload has arrays that only this tier receives; it is empty at full width. The regions are the same in
        every round, so ``number`` has no effect.
        """
        return Placement(self.regions, extract(weights, self.regions) if self.width != 1.0 else {})

    @cached_property
    def share(self) -> float:
        """Fraction of the model's maskable entries (fiarse.md 2.9) that the level holds, in (0, 1].

        Added exits are counted neither in the level nor in the model, as in the specification: they are less than a
        percent.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in self.spec.weights.items()}
        counted = [name for name in maskable(self.spec) if name.partition(".")[0] not in self.spec.exits]
        local_shapes = (
            local_shape(name, self.regions[name], shapes) for name in counted if name in self.regions
        )
        return sum(map(math.prod, local_shapes)) / sum(math.prod(shapes[name]) for name in counted)

    @cached_property
    def widest(self) -> int:
        """Number of channels of the widest layer before the exit, at full width. All widths are multiples of 1 / widest."""
        return max((atom.size for atom in channels_of(self._joint).cut()), default=1)

    @cached_property
    def _whole(self) -> BranchedUnits:
        """Units (stages of the model) up to the tier's exit, with all channels."""
        return self.spec.level(self.exit)

    @cached_property
    def _sliced(self) -> Width:
        return Width(self._joint, self.width, self.rounding)

    @cached_property
    def _joint(self) -> ModelSpec:
        """Units up to the exit as a model of one unit that returns the outputs of all exits."""
        units = _AllExits(OrderedDict(self._whole.named_children()))
        return ModelSpec(
            self.spec.name,
            sequential([(_LEVEL, units)]),
            self.spec.sample,
            self.spec.classes,
            loss=self.spec.loss,
        )


def early_exit(
    spec: ModelSpec,
    *,
    exit: int | None = None,
    width: float | None = None,
    gamma: float | None = None,
    rounding: Rounding = "ceil",
) -> EarlyExit:
    """Return the units (stages of the model) up to an early exit of the model, in a part of their channels (ScaleFL,
    Ilhan et al. 2023; fiarse.md 3).

    Args:
        spec: Model with exits.
        exit: Number of the exit, from 1. Default: the model's head.
        width: Share of the channels. Default: 1.
        gamma: Selects the values that are not given: the deepest exit whose level holds at most ``gamma`` of the
            parameters (:attr:`EarlyExit.share`), else the largest width of the first or given exit that fits.
        rounding: ``ceil`` or ``floor``, of the number of channels.

    Raises:
        ModelError: The model has no exits, or nothing fits. The error names the smallest level.
    """
    model = require_exits(spec)
    deepest = len(model.exits) + 1
    if gamma is None:
        return EarlyExit(model, deepest if exit is None else exit, 1.0 if width is None else width, rounding)
    if not 0.0 < gamma <= 1.0:
        raise ModelError(f"gamma lies in (0, 1], found {gamma}", gamma=gamma)
    if exit is not None and width is not None:
        raise ModelError(
            f"gamma={gamma:g} chooses an exit or a width, and both are given: leave out one of exit, width and gamma",
            exit=exit,
            width=width,
            gamma=gamma,
        )
    exits = range(deepest, 0, -1) if exit is None else (exit,)
    for candidate in exits:
        level = EarlyExit(model, candidate, 1.0 if width is None else width, rounding)
        if level.share <= gamma:
            return level
    if width is not None:
        raise _too_small_error(level, gamma)
    return _narrow_level(level, gamma)


def _narrow_level(whole: EarlyExit, gamma: float) -> EarlyExit:
    """Return the largest width of the level ``whole`` whose :attr:`EarlyExit.share` is at most ``gamma``, by bisection.

    Raises:
        ModelError: Even one channel per layer holds more.
    """

    def sliced(channels: int) -> EarlyExit:
        return EarlyExit(whole.spec, whole.exit, channels / whole.widest, whole.rounding)

    fits, too_large = 0, whole.widest
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if sliced(middle).share <= gamma:
            fits = middle
        else:
            too_large = middle
    if fits == 0:
        raise _too_small_error(sliced(1) if whole.widest > 1 else whole, gamma)
    return sliced(fits)


def _too_small_error(smallest: EarlyExit, gamma: float) -> ModelError:
    share = smallest.share
    return ModelError(
        f"no level of {smallest.spec.name} is as small as gamma={gamma:g}: exit {smallest.exit} in {smallest.width:.4g} of "
        f"the width holds {share:.4g} of the parameters; take gamma >= {share:.4g}, or another kind",
        gamma=gamma,
        exit=smallest.exit,
        width=smallest.width,
        smallest=share,
    )
