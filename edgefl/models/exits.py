"""Early exits for any model: classifiers behind inner units, trained together with the head (ScaleFL, fiarse.md 3).

The classifiers are units of the model, ``<unit>_exit`` behind ``<unit>``, so they lie in the global weights under names
of their own, whatever a tier holds of them::

    spec = with_exits(resnet18())    # block2_exit, block4_exit, block6_exit; the model's own head is the last exit
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.layers.initial import initialize
from edgefl.models.losses.exit_loss import ExitLoss
from edgefl.models.spec import ModelSpec, output_spec, sequential
from edgefl.models.tied import borrowed
from edgefl.models.zoo.catalog import build_model

SUFFIX = "_exit"
RUNS = 4
"""Number of runs of units, hence of exits, of a model without stages: the number of sizes in the paper."""


class Exit(nn.Module):
    """Classifier behind a unit: mean over positions, then a dense layer, from (B, ...) to the head's (B, *out).

    As a unit of a model it returns its input (``passes``); as the last unit of a shallower one it is the head.
    """

    def __init__(self, dense: nn.Linear, positions: tuple[int, ...], *, passes: bool = True) -> None:
        super().__init__()
        self.dense, self.positions, self.passes = dense, positions, passes

    def forward(self, x: Tensor) -> Tensor:
        return x if self.passes else self.classify(x)

    def classify(self, x: Tensor) -> Tensor:
        """Return the exit's output for the output of the unit before it."""
        pooled = x.mean(dim=self.positions) if self.positions else x
        if pooled.shape[-1] != self.dense.weight.shape[1]:
            raise ModelError(
                f"an exit reads {self.dense.weight.shape[1]} features, found {pooled.shape[-1]}: cut a model with exits "
                "by kind early_exit (with width=...), which narrows its exits too",
                features=pooled.shape[-1],
            )
        logits: Tensor = self.dense(pooled)
        return logits

    def as_head(self) -> Exit:
        """Return the same classifier, with shared tensors, as the head of the units before it."""
        return Exit(self.dense, self.positions, passes=False).train(self.training)


class BranchedUnits(nn.Sequential):
    """Units with exits among them.

    Inference returns the output of the last unit, (B, *out). Training returns the outputs of all exits, the head's last,
    (B, m, *out).
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.all_exits(x)
        for unit in self:
            x = unit(x)
        return x

    def all_exits(self, x: Tensor) -> Tensor:
        """Return the outputs of all exits, (B, m, *out), in any mode."""
        outputs = []
        for unit in self:
            if isinstance(unit, Exit) and unit.passes:
                outputs.append(unit.classify(x))
            else:
                x = unit(x)
        return torch.stack((*outputs, x), dim=1)


@dataclass(frozen=True, eq=False)
class ExitSpec(ModelSpec):
    """Model with exits among its units; a part that contains the head trains the exits in it too."""

    def part(self, start: int, stop: int) -> nn.Sequential:
        units = super().part(start, stop)
        return branch(units.named_children()) if stop >= len(self.units) else units

    @property
    def exits(self) -> tuple[str, ...]:
        """Names of the units that are exits, in order; the head, the last exit, is not among them."""
        return tuple(name for name, unit in self.module.named_children() if isinstance(unit, Exit))

    def level(self, exit: int) -> BranchedUnits:
        """Return the units up to exit ``exit`` (counted from 1), which is then the head; the modules are shared.

        Raises:
            ModelError: the model has no such exit.
        """
        count = len(self.exits) + 1
        if not 1 <= exit <= count:
            names = ", ".join([*self.exits, self.units[-1]])
            raise ModelError(
                f"{self.name} has the exits 1..{count} ({names}); found {exit}", exit=exit, exits=count
            )
        if exit == count:
            return branch(self.module.named_children())
        stop = self.units.index(self.exits[exit - 1])
        ending = self.module.get_submodule(self.units[stop])
        assert isinstance(ending, Exit)
        level = branch([*self.part(0, stop).named_children(), (self.units[stop], ending.as_head())])
        for path, name in borrowed(level).items():
            raise ModelError(
                f"exit {exit} of {self.name} ends before {name!r}, to which {path!r} is tied: give each its own weights, or "
                "take a kind that keeps the head, such as output_side or importance",
                exit=exit,
                names=(path, name),
            )
        return level


def branch(units: Iterator[tuple[str, nn.Module]] | Sequence[tuple[str, nn.Module]]) -> BranchedUnits:
    """Return a :class:`BranchedUnits` with these named children."""
    return BranchedUnits(OrderedDict(units))


def with_exits(
    spec: ModelSpec, after: Sequence[str] = (), *, kd_weight: float = 0.0, seed: int = 0
) -> ExitSpec:
    """Return ``spec`` with an exit behind each unit of ``after``; the units and their values are ``spec``'s own.

    Samples (C, H, W) and the like are read as channels first, (T, C) as tokens of C features. The mean over positions
    goes into the exit, unless the head has an output at every token.

    Args:
        spec: the model.
        after: names of units. By default the ends of stages, which are runs of units with one output shape, except
            the last two, because the head is behind the last. A model of a single stage has up to four runs of nearly equal
            length.
        kd_weight: as in :class:`edgefl.models.losses.exit_loss.ExitLoss`.
        seed: seed of the exits' initial values.

    Raises:
        ModelError: an exit cannot lie behind one of the units.
    """
    if isinstance(spec, ExitSpec):
        raise ModelError(f"{spec.name} has exits already: {', '.join(spec.exits)}", model=spec.name)
    results = _results(spec)
    places = tuple(after) or _stage_ends(spec, results) or _run_ends(spec)
    _check_places(spec, places)
    out = results[spec.units[-1]]
    made = initialize(
        lambda: sequential((f"{unit}{SUFFIX}", _exit(unit, results[unit], out)) for unit in places), seed
    )
    units: list[tuple[str, nn.Module]] = []
    for name, unit in spec.module.named_children():
        units.append((name, unit))
        if name in places:
            units.append((f"{name}{SUFFIX}", made.get_submodule(f"{name}{SUFFIX}").train(unit.training)))
    attributes: dict[str, Any] = {entry.name: getattr(spec, entry.name) for entry in fields(spec)}
    loss = ExitLoss(spec.loss, len(out.shape) + 1, kd_weight)
    return ExitSpec(
        **attributes | {"module": branch(units).train(spec.module.training), "loss": loss, "source": None}
    )


def early_exits(
    *,
    base: str,
    after: Sequence[str] = (),
    kd_weight: float = 0.0,
    in_channels: int | None = None,
    size: int | None = None,
    classes: int | None = None,
    seed: int = 0,
    **options: Any,
) -> ExitSpec:
    """Return the model ``base`` of :func:`edgefl.models.zoo.catalog.build_model` with exits; a factory for federation files.

    ``[model] name = "edgefl.models.exits:early_exits"``, with ``options.base``, ``options.after`` and the options of
    the base model. Options that are None keep the base model's defaults.
    """
    offered = {"in_channels": in_channels, "size": size, "classes": classes}
    shape_options = {name: value for name, value in offered.items() if value is not None}
    return with_exits(
        build_model(base, seed=seed, **shape_options, **options), after, kd_weight=kd_weight, seed=seed + 1
    )


def channel_dim(shape: Sequence[int]) -> int:
    """Return the dimension of the channels in one sample's features: the last of (T, C), otherwise the first."""
    return 1 if len(shape) == 2 else 0


def _results(spec: ModelSpec) -> dict[str, TensorSpec]:
    """Return one sample of each unit's output."""
    results, sample = dict[str, TensorSpec](), spec.sample
    for position, unit in enumerate(spec.units):
        sample = results[unit] = output_spec(spec.part(position, position + 1), sample)
    return results


def _stage_ends(spec: ModelSpec, results: dict[str, TensorSpec]) -> tuple[str, ...]:
    """Return the last unit of each stage except the last two. Units without weights, such as pooling, end the one before."""
    holding = {name.partition(".")[0] for name in spec.weights}
    ends: list[str] = []
    for _, run in groupby(spec.units, lambda unit: results[unit].shape):
        units = list(run)
        if ends and holding.isdisjoint(units):
            ends[-1] = units[-1]
        elif not holding.isdisjoint(units):
            ends.append(units[-1])
    return tuple(ends[:-2])


def _run_ends(spec: ModelSpec) -> tuple[str, ...]:
    """Return the ends of up to ``RUNS`` runs of the units with weights, without the last run and the last unit."""
    holding = {name.partition(".")[0] for name in spec.weights}
    units = [unit for unit in spec.units if unit in holding][:-1]
    count = min(RUNS, len(units))
    return tuple(units[-(-number * len(units) // count) - 1] for number in range(1, count))


def _check_places(spec: ModelSpec, places: tuple[str, ...]) -> None:
    if not places:
        raise ModelError(
            f"{spec.name} has no place for an exit before its head: it needs two units with weights and a head, its "
            f"units are {', '.join(spec.units)}",
            model=spec.name,
            units=spec.units,
        )
    inner = spec.units[:-1]
    for place in places:
        if place not in inner or places.count(place) > 1 or f"{place}{SUFFIX}" in spec.units:
            raise ModelError(
                f"an exit lies behind a unit of {spec.name} that is not the last and has none yet, hence one of "
                f"{', '.join(inner)}; found {place!r}",
                model=spec.name,
                unit=place,
                units=inner,
            )


def _exit(unit: str, features: TensorSpec, out: TensorSpec) -> Exit:
    shape = features.shape
    channels = channel_dim(shape)
    at_every_token = len(out.shape) > 1 and out.shape[:-1] == shape[:-1]
    if not features.dtype.is_floating_point or not shape or not (len(out.shape) == 1 or at_every_token):
        raise ModelError(
            f"an exit behind {unit!r} would turn samples of shape {shape} and type {features.dtype} into {out.shape}, "
            "the head's; it can where the head gives one vector per sample, or one per token of (tokens, features)",
            unit=unit,
            found=shape,
            wanted=out.shape,
        )
    pooled = () if at_every_token else tuple(dim + 1 for dim in range(len(shape)) if dim != channels)
    return Exit(nn.Linear(shape[-1] if at_every_token else shape[channels], out.shape[-1]), pooled)
