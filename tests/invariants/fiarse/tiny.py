"""Helpers for the invariants of the FIARSE spec: flat vectors as models, the framework's initial values, rings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from edgefl.models.spec import ModelSpec, on_meta
from edgefl.submodels.importance.learnable import spec_arrays
from edgefl.submodels.importance.thresholds import ImportanceMasks, Mask, cut
from edgefl.wire.regions import EntryRegion
from edgefl.wire.tensors import Arrays
from tests.support.reference import partial_average

Vector = npt.NDArray[np.float32]


def vector(*values: float) -> Vector:
    return np.array(values, np.float32)


def cut_vector(x: Vector, gamma: float) -> tuple[float, Mask]:
    """(theta, M0) of one flat tensor that is the whole model."""
    found = cut({"x": x}, gamma, (("x",),))
    return found.theta["x"], found.masks["x"]


def framework_default(spec: ModelSpec, seed: int = 0) -> ModelSpec:
    """The same model with torch's own initial values: uniform in +-1/sqrt(fan_in), biases too (fiarse.md 4.1)."""

    def fill(layer: nn.Conv2d | nn.Linear) -> None:
        layer.reset_parameters()

    return _filled(spec, seed, fill)


def he_fan_out(spec: ModelSpec, seed: int = 0) -> ModelSpec:
    """The same model, convolutions He normal by fan-out, dense layers as torch has them (fiarse.md 8.1, A9)."""

    def fill(layer: nn.Conv2d | nn.Linear) -> None:
        layer.reset_parameters()
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    return _filled(spec, seed, fill)


def _filled(spec: ModelSpec, seed: int, fill: Callable[[Any], None]) -> ModelSpec:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for layer in spec.module.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                fill(layer)
    return spec


def small_models() -> st.SearchStrategy[Arrays]:
    """A few tensors with many ties and zeros, of two and of one dimension."""
    numbers = st.sampled_from([0.0, -0.0, 0.25, -0.25, 0.5, -0.5, 1.0, 3.0]) | st.floats(-4, 4, width=32)
    shapes = hnp.array_shapes(min_dims=1, max_dims=2, min_side=1, max_side=9)
    arrays = shapes.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=numbers))
    return st.lists(arrays, min_size=1, max_size=4).map(
        lambda found: {f"layer{number}.weight": array for number, array in enumerate(found)}
    )


def positions_per_weight(spec: ModelSpec) -> dict[str, int]:
    """How often one sample's forward uses each entry of a kernel: its MACs per kept parameter."""
    uses: dict[str, int] = {}
    bare = on_meta(spec.module)

    def counted(path: str) -> Callable[..., None]:
        def hook(_layer: nn.Module, _args: tuple[Tensor, ...], out: Tensor) -> None:
            uses[f"{path}.weight"] = out[0, 0].numel()

        return hook

    for path, layer in bare.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(counted(path))
    with torch.no_grad():  # not run_meta, which restores what hooks change
        bare.eval()(torch.empty((2, *spec.sample.shape), dtype=spec.sample.dtype, device="meta"))
    return uses


def mac_fraction(spec: ModelSpec, found: ImportanceMasks) -> float:
    """MACs left if every zero is skipped, over all MACs (fiarse.md 8.2)."""
    uses, weights = positions_per_weight(spec), spec_arrays(spec)
    kept = sum(int(found.masks[name].sum()) * times for name, times in uses.items())
    return kept / sum(weights[name].size * times for name, times in uses.items())


def per_scalar_average(
    x: Vector, masks: Mapping[float, Mask], uploads: Sequence[tuple[float, Vector]]
) -> Vector:
    """New global vector by our aggregate: ``uploads`` are (size, Delta), Delta = old - new, full length."""
    held = {size: np.flatnonzero(mask) for size, mask in masks.items()}
    local = [
        ({"values": EntryRegion(("x",), held[size])}, {"values": torch.from_numpy((x - delta)[held[size]])})
        for size, delta in uploads
    ]
    averaged = partial_average({"x": torch.from_numpy(x)}, local)["x"]
    return np.asarray(averaged.numpy(), np.float32)


def ring_average(x: Vector, masks: Mapping[float, Mask], uploads: Sequence[tuple[float, Vector]]) -> Vector:
    """The same by rings (fiarse.md 2.7): ring [g_(j-1) : g_j] is averaged over the participants of capacity >= g_j.

    What lies beyond the largest capacity of ``masks`` is never touched.
    """
    new, inner = x.astype(np.float64), np.zeros(x.shape, np.bool_)
    for size in sorted(masks):
        ring = masks[size] & ~inner
        deltas = [delta[ring].astype(np.float64) for capacity, delta in uploads if capacity >= size]
        if deltas:
            new[ring] -= sum(deltas) / len(deltas)
        inner = masks[size]
    return new.astype(np.float32)
