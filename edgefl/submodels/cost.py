"""Cost of one round of a submodel of any type, except memory: parameters, multiplications and bytes.

It is computed from the submodel's trained units, its frozen chunks, and its placement of the initial weights.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec, on_meta, without_values
from edgefl.models.torch_functions.storage import memory_of
from edgefl.submodels.channels.trace import plain_attention
from edgefl.submodels.submodel import Submodel
from edgefl.wire import tensors
from edgefl.wire.regions import EntryRegion, Placement, Region, extract, pieces
from edgefl.wire.tensors import Array

TRAINING = 3
"""Multiplications of a training step per one of its forward pass: outputs, gradients of inputs, and of weights."""

# Two rows: with one, batch statistics of a channel could have a single value, which torch refuses.
_ROWS = 2
NO_WEIGHT = ""
"""Name of products of activations with activations, such as attention scores."""


@dataclass(frozen=True)
class RoundCost:
    """Cost of a submodel in a round.

    Attributes:
        parameters: Number of trained entries, without moving statistics.
        macs: Multiply-accumulates of one sample's forward pass through the trained units (stages of the model), zeros
            included.
        kept_macs: Multiply-accumulates with weights that the tier holds (fiarse.md 8.2), for a runtime that skips
            zeros.
        prefix_macs: Multiply-accumulates of one sample's forward pass through the frozen units.
        download_bytes: Size of the blobs with headers (:func:`edgefl.wire.tensors.dump`), frozen units included.
        upload_bytes: Size of the update's blob.
    """

    parameters: int
    macs: int
    kept_macs: int
    prefix_macs: int
    download_bytes: int
    upload_bytes: int

    def round_macs(self, *, batch: int, steps: int, samples: int) -> int:
        """Return the multiply-accumulates of a round.

        Args:
            batch: Samples per step.
            steps: Training steps.
            samples: Local samples, each of which passes once through the frozen units (stages of the model).
        """
        return TRAINING * self.macs * batch * steps + self.prefix_macs * samples


def cost(submodel: Submodel, forwards: ForwardCostCache | None = None) -> RoundCost:
    """Return the cost of ``submodel`` in round 1, at the initial weights of its model.

    Args:
        submodel: Submodel of any kind.
        forwards: Cache of forward passes of the same model, to share with other submodels. None: use a new one.
    """
    forwards = forwards or ForwardCostCache(submodel.spec)
    weights = {name: tensor.numpy() for name, tensor in submodel.spec.weights.items()}
    placement = submodel.place(weights, 1)
    shapes = {name: array.shape for name, array in weights.items()}
    entry_counts = entries(placement.regions, shapes)
    sparse = entries({n: r for n, r in placement.regions.items() if isinstance(r, EntryRegion)}, shapes)
    by_weight = forwards.of(submodel.suffix, submodel.boundary).macs
    kept_macs = sum(
        count * sparse[name] // math.prod(shapes[name]) if name in sparse else count
        for name, count in by_weight.items()
    )
    return RoundCost(
        parameters=sum(entry_counts.get(name, 0) for name in trainable(submodel.spec)),
        macs=sum(by_weight.values()),
        kept_macs=kept_macs,
        prefix_macs=sum(sum(forwards.of(part.module, part.sample).macs.values()) for part in submodel.prefix),
        download_bytes=_download_bytes(submodel, weights, placement),
        upload_bytes=len(tensors.dump(extract(weights, placement.regions))),
    )


def model_cost(spec: ModelSpec) -> tuple[int, int]:
    """Return (number of trained parameters, multiply-accumulates of one sample's forward pass) of the whole model."""
    sizes = {name: parameter.numel() for name, parameter in spec.module.named_parameters()}
    return sum(sizes[name] for name in trainable(spec)), macs(spec.module, spec.sample)


def trainable(spec: ModelSpec) -> tuple[str, ...]:
    """Return the global names of the parameters that require a gradient."""
    return tuple(name for name, parameter in spec.module.named_parameters() if parameter.requires_grad)


def entries(regions: Mapping[str, Region], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the number of entries of each global tensor that ``regions`` hold, by name.

    Args:
        regions: Region (held entries of global tensors) of each tensor of a tier, by name.
        shapes: Shape of each global tensor, by name.
    """
    counts: dict[str, int] = {}
    for name, region in regions.items():
        for part, positions in pieces(name, region, shapes):
            count = math.prod(shapes[part]) if positions is None else positions.size
            counts[part] = counts.get(part, 0) + count
    return counts


def _download_bytes(submodel: Submodel, weights: Mapping[str, Array], placement: Placement) -> int:
    """Return the number of bytes that a device downloads: the arrays that only its tier receives, and its units' blobs.

    Each unit (stage of the model) counts once.
    """
    units = {*submodel.units, *(unit for chunk in submodel.prefix for unit in chunk.units)}
    sent = len(tensors.dump(placement.payload, placement.masks)) if placement.payload else 0
    for unit in units:
        own = {name: array for name, array in weights.items() if name.startswith(f"{unit}.")}
        sent += len(tensors.dump(own)) if own else 0
    return sent


# -- multiplications -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardCost:
    """Cost of one sample's forward pass.

    Attributes:
        macs: Multiply-accumulates by the name of the state tensor that is multiplied.
        nbytes: Bytes of the results of all operations.
    """

    macs: Mapping[str, int]
    nbytes: float


class ForwardCostCache:
    """Cache of the cost of forward passes through parts of the model ``spec``.

    Units that several submodels share run once, without values.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._others: dict[nn.Module, ForwardCost] = {}

    @cached_property
    def _shared(self) -> list[ForwardCost]:
        return _run_units(self._spec.module, self._spec.sample)

    def of(self, module: nn.Sequential, sample: TensorSpec) -> ForwardCost:
        """Return the cost of a forward pass of ``module`` on one ``sample``."""
        # A Sequential iterates over its places; children() would leave out a module that is used again.
        units, parts = list(self._spec.module), list(module)
        start = next((at for at, unit in enumerate(units) if parts and unit is parts[0]), 0)
        stop = start + len(parts)
        if len(units[start:stop]) == len(parts) and all(map(operator.is_, units[start:stop], parts)):
            return _add_costs(self._shared[start:stop])
        if module not in self._others:
            self._others[module] = _add_costs(_run_units(module, sample))
        return self._others[module]


def macs_by_weight(module: nn.Sequential, sample: TensorSpec) -> Mapping[str, int]:
    """Return the multiply-accumulates of one sample's forward pass by state tensor.

    Counts convolutions, products and recurrent cells. An op with several weights is divided by their sizes. Products
    without a weight, such as attention scores, have the name :data:`NO_WEIGHT`.
    """
    return _add_costs(_run_units(module, sample)).macs


def macs(module: nn.Sequential, sample: TensorSpec) -> int:
    """Return the multiply-accumulates of one sample's forward pass through ``module``."""
    return sum(macs_by_weight(module, sample).values())


def _run_units(module: nn.Sequential, sample: TensorSpec) -> list[ForwardCost]:
    """Run ``module`` without values and return the cost of each unit's forward pass, in order."""
    bare = on_meta(module).eval()
    x = torch.empty((_ROWS, *sample.shape), dtype=sample.dtype, device="meta")
    made: list[ForwardCost] = []
    with without_values(bare), plain_attention(), _CostMode(bare) as counter:
        for unit in bare:  # not children(), which would run a module that is used twice once
            x = unit(x)
            made.append(counter.take())
    return made


def _add_costs(parts: Sequence[ForwardCost]) -> ForwardCost:
    counts: dict[str, int] = {}
    for name, count in chain.from_iterable(part.macs.items() for part in parts):
        counts[name] = counts.get(name, 0) + count
    return ForwardCost(counts, sum(part.nbytes for part in parts))


class _CostMode(TorchDispatchMode):
    """Dispatch mode that counts multiply-accumulates per weight, and bytes of results.

    A weight is identified by its storage, because ops read views of it, such as its transpose.
    """

    def __init__(self, module: nn.Sequential) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        state = module.state_dict(keep_vars=True)
        self._names = {memory_of(tensor): name for name, tensor in state.items() if tensor.ndim > 1}
        self._macs: dict[str, int] = {}
        self._nbytes = 0

    def take(self) -> ForwardCost:
        """Return the multiply-accumulates and bytes that were counted for one sample since the last call, and reset
        them.
        """
        taken = ForwardCost(
            {name: count // _ROWS for name, count in self._macs.items()}, self._nbytes / _ROWS
        )
        self._macs, self._nbytes = {}, 0
        return taken

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._nbytes += sum(each.nbytes for each in tree_leaves(out) if isinstance(each, Tensor))
        read = [item for item in args if isinstance(item, Tensor)]
        weights = {self._names[memory_of(t)]: t.numel() for t in read if memory_of(t) in self._names}
        count = _count(func, args, kwargs or {}, out, sum(weights.values()))
        shares = weights or {NO_WEIGHT: 1}
        for name, size in shares.items() if count else ():
            self._macs[name] = self._macs.get(name, 0) + count * size // sum(shares.values())
        return out


def _count(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, weights: int) -> int:
    if func.namespace == "edgefl" and weights:  # recurrent cells: (steps, rows, features), kernels, ...
        steps, rows = args[0].shape[:2]
        return int(steps * rows * weights)
    formula = flop_registry.get(func.overloadpacket)
    return formula(*args, **kwargs, out_val=out) // 2 if formula else 0
