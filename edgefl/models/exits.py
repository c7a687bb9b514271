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
from edgefl.models.exit_loss import ExitLoss
from edgefl.models.layers.initial import initialised
from edgefl.models.spec import ModelSpec, output_spec, sequential
from edgefl.models.tied import borrowed
from edgefl.models.zoo.catalog import build_model

SUFFIX = "_exit"
RUNS = 4
"""Runs of units, hence exits, that a model without stages gets: as many as the paper has sizes."""


class Exit(nn.Module):
    """Mean over positions, then a dense layer: a unit's output (B, ...) to the head's (B, *out).

    As a unit of a model it hands its input on (``passes``); as the last unit of a shallower one it is the head.
    """

    def __init__(self, dense: nn.Linear, positions: tuple[int, ...], *, passes: bool = True) -> None:
        super().__init__()
        self.dense, self.positions, self.passes = dense, positions, passes

    def forward(self, x: Tensor) -> Tensor:
        return x if self.passes else self.classify(x)

    def classify(self, x: Tensor) -> Tensor:
        """What the exit says of the output of the unit before it."""
        pooled = x.mean(dim=self.positions) if self.positions else x
        if pooled.shape[-1] != self.dense.weight.shape[1]:
            raise ModelError(
                f"an exit reads {self.dense.weight.shape[1]} features, found {pooled.shape[-1]}: cut a model with exits "
                "by kind early_exit (with width=...), which narrows its exits too",
                features=pooled.shape[-1],
            )
        logits: Tensor = self.dense(pooled)
        return logits

    def last(self) -> Exit:
        """The same classifier (its tensors are shared) as the head of what comes before it."""
        return Exit(self.dense, self.positions, passes=False).train(self.training)


class Branched(nn.Sequential):
    """Units with exits among them.

    Inference is the chain of the units, so the last one alone speaks: (B, *out). Training gives what each exit says,
    the last one last: (B, m, *out).
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.every(x)
        for unit in self:
            x = unit(x)
        return x

    def every(self, x: Tensor) -> Tensor:
        """(B, m, *out), in any mode."""
        outputs = []
        for unit in self:
            if isinstance(unit, Exit) and unit.passes:
                outputs.append(unit.classify(x))
            else:
                x = unit(x)
        return torch.stack((*outputs, x), dim=1)


@dataclass(frozen=True, eq=False)
class ExitSpec(ModelSpec):
    """A model some of whose units are exits; whatever part of it reaches the head trains the exits in it too."""

    def part(self, start: int, stop: int) -> nn.Sequential:
        units = super().part(start, stop)
        return branched(units.named_children()) if stop >= len(self.units) else units

    @property
    def exits(self) -> tuple[str, ...]:
        """Names of the units that are exits, in order; the model's head is one more, the last."""
        return tuple(name for name, unit in self.module.named_children() if isinstance(unit, Exit))

    def level(self, exit: int) -> Branched:
        """The units up to exit ``exit`` (counted from 1), which is then the head; the modules are shared.

        ModelError for an exit that the model does not have.
        """
        count = len(self.exits) + 1
        if not 1 <= exit <= count:
            names = ", ".join([*self.exits, self.units[-1]])
            raise ModelError(
                f"{self.name} has the exits 1..{count} ({names}); found {exit}", exit=exit, exits=count
            )
        if exit == count:
            return branched(self.module.named_children())
        stop = self.units.index(self.exits[exit - 1])
        ending = self.module.get_submodule(self.units[stop])
        assert isinstance(ending, Exit)
        level = branched([*self.part(0, stop).named_children(), (self.units[stop], ending.last())])
        for path, name in borrowed(level).items():
            raise ModelError(
                f"exit {exit} of {self.name} ends before {name!r}, to which {path!r} is tied: give each its own weights, or "
                "take a kind that keeps the head, such as output_side or importance",
                exit=exit,
                names=(path, name),
            )
        return level


def branched(units: Iterator[tuple[str, nn.Module]] | Sequence[tuple[str, nn.Module]]) -> Branched:
    """A :class:`Branched` with these named children."""
    return Branched(OrderedDict(units))


def with_exits(
    spec: ModelSpec, after: Sequence[str] = (), *, kd_weight: float = 0.0, seed: int = 0
) -> ExitSpec:
    """``spec`` with an exit behind each unit of ``after``; the units and their values are ``spec``'s own.

    Without ``after`` the exits lie at the ends of stages, which are runs of units with one output shape, up to the
    last but one: behind the last stage comes the head. A model of a single stage is cut into up to four runs of nearly
    equal length. Samples (C, H, W) and the like are read as channels first, (T, C) as tokens of C features; the mean
    over positions goes into the exit, except where the head says something at every token.
    ``kd_weight`` is that of :class:`edgefl.models.exit_loss.ExitLoss`. ModelError where an exit cannot be put.
    """
    if isinstance(spec, ExitSpec):
        raise ModelError(f"{spec.name} has exits already: {', '.join(spec.exits)}", model=spec.name)
    results = _results(spec)
    places = tuple(after) or _stage_ends(spec, results) or _run_ends(spec)
    _check_places(spec, places)
    out = results[spec.units[-1]]
    made = initialised(
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
        **attributes | {"module": branched(units).train(spec.module.training), "loss": loss, "source": None}
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
    """The model ``base`` (as :func:`edgefl.models.zoo.catalog.build_model` has it) with exits: a factory for
    federation files.

    ``[model] name = "edgefl.models.exits:early_exits"``, with ``options.base``, ``options.after`` and the options of
    the base model. What is None is not told to the base model.
    """
    offered = {"in_channels": in_channels, "size": size, "classes": classes}
    shape_options = {name: value for name, value in offered.items() if value is not None}
    return with_exits(
        build_model(base, seed=seed, **shape_options, **options), after, kd_weight=kd_weight, seed=seed + 1
    )


def channel_dim(shape: Sequence[int]) -> int:
    """Which dimension of one sample's features are the channels: the last of (T, C), otherwise the first."""
    return 1 if len(shape) == 2 else 0


def _results(spec: ModelSpec) -> dict[str, TensorSpec]:
    """One sample of each unit's output."""
    results, sample = dict[str, TensorSpec](), spec.sample
    for position, unit in enumerate(spec.units):
        sample = results[unit] = output_spec(spec.part(position, position + 1), sample)
    return results


def _stage_ends(spec: ModelSpec, results: dict[str, TensorSpec]) -> tuple[str, ...]:
    """The last unit of each stage but the last two. Units without weights, such as pooling, end the stage before."""
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
    """The ends of all but the last of up to ``RUNS`` runs of the units with weights, the last unit left out."""
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
    said_everywhere = len(out.shape) > 1 and out.shape[:-1] == shape[:-1]
    if not features.dtype.is_floating_point or not shape or not (len(out.shape) == 1 or said_everywhere):
        raise ModelError(
            f"an exit behind {unit!r} would turn samples of shape {shape} and type {features.dtype} into {out.shape}, "
            "the head's; it can where the head gives one vector per sample, or one per token of (tokens, features)",
            unit=unit,
            found=shape,
            wanted=out.shape,
        )
    pooled = () if said_everywhere else tuple(dim + 1 for dim in range(len(shape)) if dim != channels)
    return Exit(nn.Linear(shape[-1] if said_everywhere else shape[channels], out.shape[-1]), pooled)
