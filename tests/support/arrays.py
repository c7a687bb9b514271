"""Conversion between tensors and arrays by name, as copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from edgefl.contract.tensors import Tensors
from edgefl.models.spec import ModelSpec
from edgefl.wire.tensors import Array, Arrays


def weights_of(spec: ModelSpec) -> Arrays:
    """Return the model's weights as arrays."""
    return {name: tensor.numpy().copy() for name, tensor in spec.weights.items()}


def as_tensors(arrays: Mapping[str, Array]) -> Tensors:
    """Return arrays as tensors."""
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
