"""Early exits for any model: classifiers behind inner units, trained together with the head (ScaleFL, fiarse.md 3).

The classifiers are units of the model: ``<unit>_exit`` follows ``<unit>``. Their weights have names of their own in the
global weights, whichever part of them a tier holds::

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
from edgefl.models.layers.initial import Initial, initialize
from edgefl.models.losses.exit_loss import ExitLoss
from edgefl.models.spec import ModelSpec, output_spec, sequential
from edgefl.models.tied import borrowed_names
from edgefl.models.zoo.catalog import build_model

SUFFIX = "_exit"
RUNS = 4
"""Number of exits (the head included) of a model without stages: the number of sizes in the paper."""


class Exit(nn.Module):
    """Classifier behind a unit of a model: mean over the positions, then a dense layer.

    It maps features (B, ...) of the unit to an output (B, *out) like that of the model's head.

    Args:
        dense: Dense layer.
        positions: Dimensions over which to average. Empty: classify each token.
        passes: True for an exit between units, whose forward returns its input; :meth:`classify` computes its output.
            False for the head of a shallower model, whose forward classifies.
    """

    def __init__(self, dense: nn.Linear, positions: tuple[int, ...], *, passes: bool = True) -> None:
        super().__init__()
        self.dense, self.positions, self.passes = dense, positions, passes

    def forward(self, x: Tensor) -> Tensor:
        return x if self.passes else self.classify(x)

    def classify(self, x: Tensor) -> Tensor:
        """Return the classifier's output (B, *out) for the features ``x`` (B, ...) of the unit (stage of the model)
        before it.

        Raises:
            ModelError: ``x`` has another number of features than the classifier.
        """
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
        """Return an exit that shares the tensors and whose forward classifies, to be the last unit of a shallower model."""
        return Exit(self.dense, self.positions, passes=False).train(self.training)


class BranchedUnits(nn.Sequential):
    """Sequence of units with exits between them.

    In inference mode it returns the output of the last unit, (B, *out). In training mode it returns the outputs of all
    m exits, the head's last, (B, m, *out).
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.all_exits(x)
        for unit in self:
            x = unit(x)
        return x

    def all_exits(self, x: Tensor) -> Tensor:
        """Return the outputs of all m exits in any mode, (B, m, *out)."""
        outputs = []
        for unit in self:
            if isinstance(unit, Exit) and unit.passes:
                outputs.append(unit.classify(x))
            else:
                x = unit(x)
        return torch.stack((*outputs, x), dim=1)


@dataclass(frozen=True, eq=False)
class ExitSpec(ModelSpec):
    """Model with exits (classifiers that are units of their own) between its other units (stages of the model)."""

    def part(self, start: int, stop: int) -> nn.Sequential:
        """Return units (stages of the model) ``start`` to ``stop - 1`` as one module, like :meth:`ModelSpec.part`.

        A part with the head returns the outputs of all its exits in training.
        """
        units = super().part(start, stop)
        return branch(units.named_children()) if stop >= len(self.units) else units

    @property
    def exits(self) -> tuple[str, ...]:
        """Names of the exits in order, without the head."""
        return tuple(name for name, unit in self.module.named_children() if isinstance(unit, Exit))

    def level(self, exit: int) -> BranchedUnits:
        """Return the model that ends at an exit, which becomes its head, as a sequence of units (stages of the model).

        The tensors are shared.

        Args:
            exit: Number of the exit from 1; the head has the highest.

        Raises:
            ModelError: The model has no such exit, or weights before it are tied to weights behind it.
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
        for path, name in borrowed_names(level).items():
            raise ModelError(
                f"exit {exit} of {self.name} ends before {name!r}, to which {path!r} is tied: give each its own weights, or "
                "take a kind that keeps the head, such as output_side or importance",
                exit=exit,
                names=(path, name),
            )
        return level


def branch(units: Iterator[tuple[str, nn.Module]] | Sequence[tuple[str, nn.Module]]) -> BranchedUnits:
    """Return a :class:`BranchedUnits` with the units (stages of the model), given as pairs (name, module)."""
    return BranchedUnits(OrderedDict(units))


def with_exits(
    spec: ModelSpec,
    after: Sequence[str] = (),
    *,
    kd_weight: float = 0.0,
    initial: Initial = "keras",
    seed: int = 0,
) -> ExitSpec:
    """Return a model with the units of ``spec`` and additional exits. The units are shared, not copied.

    The exits are units ``<unit>_exit``. Samples of shape (T, C) are read as tokens with C features, all others as channels
    first, such as (C, H, W). An exit averages over the positions, unless the head classifies each token.

    Args:
        spec: Model without exits.
        after: Names of the units that an exit follows. Empty: the last unit of each stage except the last two, where a
            stage is a run of units with equal output shapes. For a model of one stage: the ends of up to four runs of
            nearly equal length.
        kd_weight: Weight of the distillation, see :class:`edgefl.models.losses.exit_loss.ExitLoss`.
        initial: Library whose defaults the exits' initial values follow, ``keras`` or ``torch``.
        seed: Seed of the exits' initial values.

    Raises:
        ModelError: The model has exits already, or a unit cannot be followed by an exit.
    """
    if isinstance(spec, ExitSpec):
        raise ModelError(f"{spec.name} has exits already: {', '.join(spec.exits)}", model=spec.name)
    results = _results(spec)
    places = tuple(after) or _stage_ends(spec, results) or _run_ends(spec)
    _check_places(spec, places)
    out = results[spec.units[-1]]
    made = initialize(
        lambda: sequential((f"{unit}{SUFFIX}", _exit(unit, results[unit], out)) for unit in places),
        seed,
        initial,
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
    """Return a model of the zoo with exits: a factory for federation files.

    Use it as ``[model] name = "edgefl.models.exits:early_exits"``, with ``options.base``, ``options.after`` and the
    options of the base model.

    Args:
        base: Name of the model (:func:`edgefl.models.zoo.catalog.build_model`).
        after: Names of the units (stages of the model) that an exit follows. Empty: chosen by :func:`with_exits`.
        kd_weight: Weight of the distillation (:class:`edgefl.models.losses.exit_loss.ExitLoss`).
        in_channels: Channels of a sample. None: the base model's default.
        size: Height and width of a sample. None: the base model's default.
        classes: Number of classes. None: the base model's default.
        seed: Seed of all initial values.
        options: Other options of the base model.

    Raises:
        ModelError: There is no such model or option, or a unit cannot be followed by an exit.
    """
    offered = {"in_channels": in_channels, "size": size, "classes": classes}
    shape_options = {name: value for name, value in offered.items() if value is not None}
    return with_exits(
        build_model(base, seed=seed, **shape_options, **options),
        after,
        kd_weight=kd_weight,
        initial=options.get("initial", "keras"),
        seed=seed + 1,
    )


def channel_dim(shape: Sequence[int]) -> int:
    """Return the channel dimension of one sample's features, without batch dimension: 1 if the shape is (T, C), else 0."""
    return 1 if len(shape) == 2 else 0


def _results(spec: ModelSpec) -> dict[str, TensorSpec]:
    """Return the spec of one output sample of each unit (stage of the model), without batch dimension, by the unit's
    name.
    """
    results, sample = dict[str, TensorSpec](), spec.sample
    for position, unit in enumerate(spec.units):
        sample = results[unit] = output_spec(spec.part(position, position + 1), sample)
    return results


def _stage_ends(spec: ModelSpec, results: dict[str, TensorSpec]) -> tuple[str, ...]:
    """Return the name of the last unit of each stage except the last two; () if there are not more than two.

    A stage is a run of units with equal output shapes in ``results``. Units without weights, such as pooling, count to the
    stage before.
    """
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
    """Divide the units (stages of the model) with weights, without the head, into up to ``RUNS`` consecutive runs.

    Return the name of the last unit of each run but the last; () if there is only one run.
    """
    holding = {name.partition(".")[0] for name in spec.weights}
    units = [unit for unit in spec.units if unit in holding][:-1]
    count = min(RUNS, len(units))
    return tuple(units[-(-number * len(units) // count) - 1] for number in range(1, count))


def _check_places(spec: ModelSpec, places: tuple[str, ...]) -> None:
    """Raise ModelError unless an exit can follow each of the units (stages of the model) ``places``."""
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
    """Return a new exit behind ``unit``.

    Args:
        unit: Name of the unit, for errors.
        features: One output sample of the unit.
        out: One output sample of the head, whose shape the exit's output has.

    Raises:
        ModelError: No exit can turn such features into the shape of ``out``.
    """
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
