"""Maskable tensors (fiarse.md 2.9), and their groups, each with one threshold (fiarse.md 2.3, A18).

A group is the whole model, one tensor, or the tensors of a part of the model (a shard).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

from torch import nn

from edgefl.errors import ModelError
from edgefl.models.layers.recurrent import LstmDirection, Stack
from edgefl.models.spec import ModelSpec, output_spec
from edgefl.submodels.importance.thresholds import Groups

# Layers all of whose own parameters are kernels, embeddings, or biases added to a kernel's product.
_LAYERS = (
    nn.modules.conv._ConvNd,
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    Stack,
    LstmDirection,
)


def maskable(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names, in state order, of the trained tensors of convolutions, dense, recurrent and embedding layers.

    Biases are included: fiarse.md 2.9 lists the bias of a dense layer, and those of convolutions and recurrent layers have
    the same role. Every other tensor is dense: the affine pair of any norm, moving statistics, a user's bare parameters
    (positions of a ViT, layer scales of ConvNeXt), and tensors that are not trained.
    """
    names = {
        f"{path}.{name}"
        for path, module in spec.module.named_modules()
        if isinstance(module, _LAYERS)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }
    return tuple(name for name in spec.weights if name in names)


def frozen(spec: ModelSpec) -> frozenset[str]:
    """Return the names of the parameters that require no gradient. Buffers are not included."""
    named = spec.module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if not parameter.requires_grad)


def dense(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names, in state order, of the tensors that every tier holds whole: all but the maskable ones."""
    thinned = set(maskable(spec))
    return tuple(name for name in spec.weights if name not in thinned)


Shards = tuple[tuple[str, ...], ...]
"""Paths of each shard: units, or any longer part of a tensor's name up to a dot."""

Kind = Literal["model", "layer", "shard"]


@dataclass(frozen=True)
class GroupingStrategy:
    """Rule by which maskable tensors are grouped; each group is ranked separately and keeps the same fraction.

    Attributes:
        kind: ``model``: one group with all entries, the paper's best. ``layer``: one group per tensor. ``shard``:
            one group per entry of ``shards``.
        shards: List of paths per shard, with each maskable tensor in exactly one shard; or a number of runs of
            consecutive units; or None for the model's :func:`stages`.
    """

    kind: Kind = "model"
    shards: Shards | int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ModelError(
                f"a threshold strategy is one of {', '.join(get_args(Kind))}; found {self.kind!r}",
                strategy=self.kind,
            )
        if self.shards is not None and self.kind != "shard":
            raise ModelError(
                f"shards belong to the strategy 'shard', found {self.kind!r}",
                strategy=self.kind,
                shards=self.shards,
            )

    def groups(self, spec: ModelSpec) -> Groups:
        """Return the groups of maskable tensors of ``spec``: one tuple of tensor names per group that is ranked
        separately.

        Raises:
            ModelError: The model has no maskable tensors, or one of them is not in exactly one shard.
        """
        names = maskable(spec)
        if not names:
            raise ModelError(
                f"{spec.name} has no layer whose weights importance can thin out; give it convolutions, dense, recurrent "
                "or embedding layers, or use another kind of submodel",
                model=spec.name,
            )
        if self.kind == "model":
            return (names,)
        if self.kind == "layer":
            return tuple((name,) for name in names)
        return _partition(names, self._shards(spec))

    def _shards(self, spec: ModelSpec) -> Shards:
        if self.shards is None:
            return stages(spec)
        return consecutive(spec, self.shards) if isinstance(self.shards, int) else self.shards


def stages(spec: ModelSpec) -> Shards:
    """Return the default shards of a model: groups of units (stages) whose entries are ranked together, as their names.

    They are the first unit with weights, then each run of units whose outputs have the same shape. ResNet-18 has six,
    as the authors divide it: stem, four stages, classifier. A transformer has its embedding, its blocks and its head.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    sample = spec.sample
    for position, unit in enumerate(spec.units):
        sample = output_spec(spec.part(position, position + 1), sample)
        shapes[unit] = sample.shape
    first, *others = _maskable_units(spec)
    return ((first,), *(tuple(run) for _, run in groupby(others, shapes.__getitem__)))


def consecutive(spec: ModelSpec, shards: int) -> Shards:
    """Return the names of the units (stages of the model) with maskable tensors, divided into ``shards`` consecutive runs.

    Their lengths differ by at most one, longer runs first.

    Raises:
        ModelError: There are fewer units than shards, or ``shards`` is below 1.
    """
    units = _maskable_units(spec)
    if not 1 <= shards <= len(units):
        raise ModelError(
            f"{spec.name} has {len(units)} units with weights, so 1..{len(units)} shards; found {shards}",
            shards=shards,
            units=units,
        )
    length, longer = divmod(len(units), shards)
    starts = [number * length + min(number, longer) for number in range(shards + 1)]
    return tuple(units[starts[number] : starts[number + 1]] for number in range(shards))


def _maskable_units(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the units (stages of the model) with maskable tensors."""
    holding = {name.partition(".")[0] for name in maskable(spec)}
    return tuple(unit for unit in spec.units if unit in holding)


def _partition(names: tuple[str, ...], shards: Shards) -> Groups:
    """Return the tensor ``names`` of each shard, in order.

    Raises:
        ModelError: A shard is empty, or a name is not in exactly one shard.
    """
    groups = tuple(tuple(name for name in names if _lies_in(name, shard)) for shard in shards)
    for shard, group in zip(shards, groups, strict=True):
        if not group:
            raise ModelError(f"the shard {shard} holds no weights that importance can thin out", shard=shard)
    for name in names:
        times = sum(name in group for group in groups)
        if times != 1:
            raise ModelError(
                f"the tensor {name!r} lies in {times} shards of {shards}; list its unit or path in exactly one",
                name=name,
                shards=shards,
            )
    return groups


def _lies_in(name: str, shard: tuple[str, ...]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in shard)
