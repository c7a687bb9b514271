"""Statistics of a device's data: one pass over its rows, which reports integer sums and needs no model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.statistics import (
    FRACTION_BITS,
    LARGEST,
    LIMB_BITS,
    MOST_CLASSES,
    SQUARE_LIMBS,
    STATISTICS,
    VALUE_LIMBS,
    Statistic,
    StatisticsRequest,
    ValueGroups,
)

_MOST_ROWS = 256
_BATCH_ENTRIES = 1 << 15
"""Entries of a batch, of samples or of compared classes. The step holds some copies of them in float64."""


def statistics(request: StatisticsRequest, data: DataSpec, label: TensorSpec) -> Algorithm:
    """Return the exchange (round trip between server and device) in which a device sums up its own rows.

    ``start`` reads nothing, each step adds one batch, and ``finish`` returns ``update.<name>`` int64
    (docs/fleets/statistics.md, The sums). Rows that only fill the last batch are masked.

    Args:
        request: The statistics.
        data: Shape and dtype of a sample.
        label: Shape and dtype of its label.

    Raises:
        ConfigError: The data do not have a statistic of the request.
    """
    has_classes = not label.dtype.is_floating_point and 1 <= data.classes <= MOST_CLASSES
    names = request.of(data, has_classes=has_classes)
    summed = _Sums(names, request.edges, data, label)
    rows = max(1, min(_MOST_ROWS, _BATCH_ENTRIES // summed.entries))
    sample = TensorSpec(data.shape, getattr(torch, data.dtype), data.below or None)
    batch = {"batch.0.mask": TensorSpec((rows,)), "batch.0.x": sample.rows(rows)}
    if "classes" in names:
        batch["batch.0.y"] = label.rows(rows)
    zeros = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in summed.shapes.items()}
    specs = prefixed("state.sum", {name: TensorSpec.of(zero) for name, zero in zeros.items()})

    def start(_: Tensors) -> Tensors:
        return prefixed("state.sum", {name: torch.zeros_like(zero) for name, zero in zeros.items()})

    def step(tensors: Tensors) -> Tensors:
        total, found = select(tensors, "state.sum"), summed.of(tensors)
        return prefixed("state.sum", {name: total[name] + found[name] for name in total})

    def finish(tensors: Tensors) -> Tensors:
        return prefixed("update", {name: total + 0 for name, total in select(tensors, "state.sum").items()})

    def count(tensors: Tensors) -> Tensors:
        return {"metric.count": tensors["batch.0.mask"].sum()}

    bound = max(2, data.classes)
    return Algorithm(
        name=STATISTICS,
        start=Function("start_statistics", start, {}),
        phases=(Phase(STATISTICS, Function("add_batch", step, specs | batch, bound), 0, over_data=True),),
        finish=Function("finish_statistics", finish, specs),
        evaluate=Function("count_rows", count, {"batch.0.mask": batch["batch.0.mask"]}),
    )


class _Sums:
    """Sums of one batch that the requested statistics need, with ``shapes``: the shape of each sum, by name."""

    def __init__(
        self, names: tuple[Statistic, ...], edges: tuple[float, ...], data: DataSpec, label: TensorSpec
    ) -> None:
        self._names = names
        self._edges = edges
        self._axis = ValueGroups.of(data).axis
        self._classes = data.classes
        groups, labels = len(ValueGroups.of(data).names), math.prod(label.shape)
        shapes: dict[Statistic, dict[str, tuple[int, ...]]] = {
            "classes": {"classes": (data.classes,)},
            "moments": {
                "count": (groups,),
                "sum": (VALUE_LIMBS, groups),
                "square": (SQUARE_LIMBS, groups),
                "beyond": (groups,),
            },
            "missing": {"missing": (groups,)},
            "histogram": {"histogram": (groups, len(edges) + 1)},
            "lengths": {"lengths": data.shape},
        }
        self.shapes: dict[str, tuple[int, ...]] = {"rows": ()}
        for name in names:
            self.shapes |= shapes[name]
        self.entries = max(
            math.prod(data.shape) * (data.shape[0] if "lengths" in names else 1),
            labels * data.classes if "classes" in names else 1,
        )

    def of(self, batch: Tensors) -> Tensors:
        """Return the sums of a batch by name, int64."""
        counts = counted_rows(batch)
        found: Tensors = {"rows": counts.to(torch.int64).sum()}
        if "classes" in self._names:
            labels = batch["batch.0.y"].reshape(len(counts), -1, 1)
            is_class = (labels == torch.arange(self._classes, dtype=labels.dtype)) & counts.reshape(-1, 1, 1)
            found["classes"] = _count(is_class, (0, 1))
        if "lengths" in self._names:
            tokens = batch["batch.0.x"]
            place = torch.arange(1, tokens.shape[1] + 1)
            # The last token that is not padding; an empty text has the length 1, as in batches by length.
            length = torch.where(tokens != 0, place, torch.zeros_like(place)).amax(1, keepdim=True)
            is_length = (length.clamp(min=1) == place) & counts.reshape(-1, 1)
            found["lengths"] = _count(is_length, (0,))
        if {"moments", "missing", "histogram"} & set(self._names):
            found |= self._of_values(batch["batch.0.x"], counts)
        return found

    def _of_values(self, samples: Tensor, counts: Tensor) -> Tensors:
        rows = len(samples)
        if self._axis is None:
            grouped = samples.reshape(rows, 1, -1)
        else:
            grouped = samples.movedim(self._axis + 1, 1)
            grouped = grouped.reshape(rows, grouped.shape[1], -1)
        values, counted = grouped.double(), counts.reshape(-1, 1, 1)
        is_number = values.abs() < math.inf  # False for NaN, too
        found: Tensors = {"missing": _count(~is_number & counted)}
        is_valid = is_number & counted
        if "moments" in self._names:
            is_within = is_valid & (values.abs() <= LARGEST)
            within = torch.where(is_within, values, torch.zeros_like(values))
            found["count"] = _count(is_within)
            found["beyond"] = _count(is_valid & ~is_within)
            found["sum"] = _limbs(within, VALUE_LIMBS)
            found["square"] = _limbs(within * within, SQUARE_LIMBS)
        if "histogram" in self._names:
            *lower, last = self._edges
            from_edge = [_count(is_valid & (values >= edge)) for edge in lower]
            from_edge.append(_count(is_valid & (values > last)))
            bins = [from_edge[place] - from_edge[place + 1] for place in range(len(lower))]
            found["histogram"] = torch.stack([_count(is_valid) - from_edge[0], *bins, from_edge[-1]], dim=1)
        return found


def counted_rows(batch: Tensors) -> Tensor:
    """Return for each row of a batch whether it counts, bool (B,): False for rows that only fill up the last batch.

    ``batch`` has ``batch.0.mask`` and ``batch.0.x``. The result does not depend on x, but its graph reads x, because a
    device always feeds that input.
    """
    is_low = batch["batch.0.x"].reshape(len(batch["batch.0.mask"]), -1)[:, 0] < 1
    return (batch["batch.0.mask"] > 0) & (is_low | ~is_low)


def _count(conditions: Tensor, over: tuple[int, ...] = (0, 2)) -> Tensor:
    return conditions.to(torch.int64).sum(over)


def _limbs(values: Tensor, limbs: int) -> Tensor:
    """Return the exact sums of ``values`` (rows, groups, entries) over rows and entries, int64 (limbs, groups).

    A sum is one fixed-point number, stored as ``limbs`` integers: limb i has the weight 2^(i * ``LIMB_BITS``). Each
    value is split without rounding, because a float64 whole number keeps its digits when a multiple of a power of two
    is subtracted.
    """
    rest, found = (values * 2.0**FRACTION_BITS).round(), []
    for place in reversed(range(1, limbs)):
        unit = 2.0 ** (LIMB_BITS * place)
        high = (rest / unit).floor()
        found.append(high)
        rest = rest - high * unit
    parts = [*found, rest]
    return torch.stack([part.to(torch.int64).sum((0, 2)) for part in reversed(parts)])
