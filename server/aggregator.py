"""Streaming average of updates with coverage: O(model) memory, and a sum that no order of arrival can change.

Every value is turned into a fixed-point integer, ``round(value * weight * 2**fraction_bits)``, once and on its own,
and integers are added exactly; so the same set of updates gives the same bits whoever came first. ::

    aggregator = Aggregator(layout_of(weights), weight_limit=16)
    checked = aggregator.check(arrays, regions)     # UpdateRejected, or an update that may be added
    aggregator.add(checked, weight=1)
    weights = aggregator.result(weights)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgefl.submodels.submodel import Region
from edgefl.wire.errors import UpdateRejected
from edgefl.wire.tensors import Array, Arrays
from server.accumulator import Coverage, Floats, Layout, accumulator, cover, flatten, layout_of

__all__ = ["VALUE_LIMIT", "Aggregator", "Checked", "layout_of"]

VALUE_LIMIT = 2.0**20
"""Largest magnitude an update may hold. No trained network comes near it; with it int64 cannot overflow."""

_VALUE_BITS = 20
_SUM_BITS = 62  # one bit stays free: each addition may have been rounded up by half a unit


@dataclass(frozen=True)
class Checked:
    """An update that passed every check: its values as one flat array, ordered by name, and what they cover."""

    flat: Floats
    coverage: Coverage


class Aggregator:
    """Weighted mean over the updates that hold each entry: ``sum(w_i * x_i) / sum(w_i)``.

    With weight 1 this is the per-unit average of EmbracingFL (section 2.3: over the clients that trained the unit),
    with slices the per-entry average of width reduction. ``weight_limit`` bounds the sum of all weights of the round;
    with VALUE_LIMIT it fixes the number of fraction bits, so the same round always rounds alike.

    With ``base``, the weights the round began with, an update counts only at the entries where it differs from them:
    the mean over non-zero changes of FIARSE's section 3 instead of the mean over holders (fiarse.md 8-A3). They differ
    where a held entry got no gradient at all, such as the rows of words that a device never saw.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        weight_limit: int,
        device: str = "auto",
        base: Mapping[str, Array] | None = None,
    ) -> None:
        self.layout = layout
        self.weight_limit = max(1, weight_limit)
        self.fraction_bits = _SUM_BITS - _VALUE_BITS - (self.weight_limit - 1).bit_length()
        self.total_weight = 0
        self._sums = accumulator(layout.size, device, None if base is None else flatten(layout, base))
        self._covers: dict[int, tuple[Mapping[str, Region], Coverage]] = {}

    def coverage(self, regions: Mapping[str, Region]) -> Coverage:
        """The compiled form of ``regions``, kept for the next update of the same tier."""
        known = self._covers.get(id(regions))
        if known is None:  # the entry keeps ``regions`` alive, so its id stays its own
            known = self._covers[id(regions)] = (regions, cover(self.layout, regions))
        return known[1]

    def check(self, arrays: Mapping[str, Array], regions: Mapping[str, Region]) -> Checked:
        """The update, ready to add; UpdateRejected if a name, shape, dtype or value is not as it should be."""
        coverage = self.coverage(regions)
        _check_names(arrays, coverage.shapes)
        for name, shape in coverage.shapes.items():
            _check_form(name, arrays[name], shape)
        parts = [arrays[name].reshape(-1) for name in coverage.shapes]
        flat: Floats = np.concatenate(parts) if parts else np.empty(0, np.float32)
        if flat.size and not (flat.max() <= VALUE_LIMIT and flat.min() >= -VALUE_LIMIT):  # false for NaN too
            _raise_bad_value(arrays)
        return Checked(flat, coverage)

    def add(self, checked: Checked, weight: int) -> None:
        """Add a checked update; ValueError if the weights would pass the limit that keeps the sum exact."""
        if weight < 1 or self.total_weight + weight > self.weight_limit:
            raise ValueError(
                f"weight {weight} after {self.total_weight} passes the limit {self.weight_limit}"
            )
        self._sums.add(checked.flat, checked.coverage, weight, float(weight) * 2.0**self.fraction_bits)
        self.total_weight += weight

    def result(self, old: Mapping[str, Array]) -> Arrays:
        """The new model: the mean where an update counts, the bits of ``old`` elsewhere."""
        mean, held = self._sums.mean(2.0**self.fraction_bits)
        new: Arrays = {}
        for name, offset in self.layout.offsets.items():
            before = old[name]
            part = slice(offset, offset + before.size)
            values = mean[part].astype(before.dtype).reshape(before.shape)
            new[name] = np.where(held[part].reshape(before.shape), values, before)
        return new


def _check_names(arrays: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing, extra = sorted(shapes.keys() - arrays.keys()), sorted(arrays.keys() - shapes.keys())
    if missing or extra:
        raise UpdateRejected(
            "wrong-names",
            f"the update should hold the {len(shapes)} tensors of its tier; missing: {_few(missing)}; "
            f"not asked for: {_few(extra)}; fetch the tier's bundle again",
            missing=missing,
            extra=extra,
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def _check_form(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise UpdateRejected(
            "wrong-shape",
            f"tensor {name} should have shape {shape}, found {array.shape}; fetch the tier's bundle again",
            name=name,
        )
    if array.dtype.kind != "f":
        raise UpdateRejected(
            "wrong-dtype", f"tensor {name} should be float32, found {array.dtype}; send floats", name=name
        )


def _raise_bad_value(arrays: Mapping[str, Array]) -> None:
    for name in sorted(arrays):
        if not np.isfinite(arrays[name]).all():
            raise UpdateRejected(
                "not-finite",
                f"tensor {name} holds NaN or infinity: training diverged on this device; lower the learning rate",
                name=name,
            )
    raise UpdateRejected(
        "too-large",
        f"the update holds values beyond {VALUE_LIMIT:.0f}: training diverged on this device; lower the learning rate",
        limit=VALUE_LIMIT,
    )
