"""Partial averaging in torch, the plain way: the oracle for the server's streaming aggregator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgefl.programs.contract import Tensors
from edgefl.submodels.submodel import Region, slices

Upload = tuple[Mapping[str, Region], Mapping[str, Tensor]]


def partial_average(weights: Mapping[str, Tensor], uploads: Sequence[Upload]) -> Tensors:
    """New global weights (EmbracingFL spec 2.3 and 2.6): each entry is the uniform mean over the uploads that hold it.

    An upload is (regions, local tensors by global name). An entry nobody holds keeps its value. Float64 inside.
    """
    sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in weights.items()}
    counts = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in weights.items()}
    for regions, tensors in uploads:
        for name, region in regions.items():
            sums[name][slices(region)] += tensors[name]
            counts[name][slices(region)] += 1
    return {
        name: torch.where(counts[name] > 0, sums[name] / counts[name].clamp_min(1), tensor).to(tensor.dtype)
        for name, tensor in weights.items()
    }
