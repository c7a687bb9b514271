"""Partial averaging in torch, the plain way: the oracle for the server's streaming aggregator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgefl.contract.tensors import Tensors
from edgefl.wire.regions import Region, pieces

Upload = tuple[Mapping[str, Region], Mapping[str, Tensor]]


def partial_average(weights: Mapping[str, Tensor], uploads: Sequence[Upload]) -> Tensors:
    """New global weights (embracingfl.md 2.3 and 2.6): each entry is the uniform mean over the uploads that hold it.

    An upload is (regions, local tensors by name). An entry nobody holds keeps its value. Float64 inside.
    """
    sums = {name: torch.zeros(tensor.numel(), dtype=torch.float64) for name, tensor in weights.items()}
    counts = {name: torch.zeros(tensor.numel(), dtype=torch.float64) for name, tensor in weights.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for regions, tensors in uploads:
        for name, region in regions.items():
            values, start = tensors[name].reshape(-1), 0
            for part, positions in pieces(name, region, shapes):
                entries = (
                    torch.arange(sums[part].numel()) if positions is None else torch.from_numpy(positions)
                )
                sums[part][entries] += values[start : start + len(entries)]
                counts[part][entries] += 1
                start += len(entries)
    return {
        name: torch.where(
            counts[name] > 0, sums[name] / counts[name].clamp_min(1), tensor.reshape(-1).double()
        )
        .to(tensor.dtype)
        .reshape(tensor.shape)
        for name, tensor in weights.items()
    }
