"""Random inputs of functions, on which exported graphs are compared with torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec

_WEIGHTS = ("weights.", "state.weights.")
"""What the names of a model's weights begin with in a function's inputs."""
_IGNORED = 0.2
"""Share of the random labels that are ignored ones, if the loss ignores any."""
_NEAR = 0.1
"""Standard deviation of a parameter around its value, relative to the value."""
_USUAL = 0.1
"""Magnitude of drawn weights, and of parameters that are zero or nearly so."""
_SMALL = 1e-2
"""A parameter of smaller magnitude is scaled up: errors behind a factor of 1e-6 would be too small to be seen."""
_MAGNITUDES = (1.0, 100.0, 10.0, 0.1)
_WHOLE = (9, 1000, 10**6, 2**25, 2**40)
"""Magnitudes of whole numbers. From 2^24 on float32 does not have all of them."""


def usual(name: str, spec: TensorSpec, generator: torch.Generator, label_range: int) -> Tensor:
    """Return the random tensor of one port (:meth:`edgefl.contract.program.Function.example`).

    Args:
        name: The port. Its role decides the distribution.
        spec: Shape, dtype, range and, for weights, the model's values.
        generator: Source of random numbers.
        label_range: Bound of whole numbers whose spec has none.
    """
    if spec.values is not None and name.startswith(_WEIGHTS) and "/" not in name:
        return _near(name, spec.values, generator)
    if spec.below is not None or not spec.dtype.is_floating_point:
        below = label_range if spec.below is None else spec.below
        drawn = torch.randint(0, below, spec.shape, generator=generator, dtype=spec.dtype)
        if spec.ignored is None:
            return drawn
        few = torch.rand(spec.shape, generator=generator) < _IGNORED
        return torch.where(few, torch.full_like(drawn, spec.ignored), drawn)
    uniform = name.startswith("noise.") or name.endswith("running_var")
    if uniform:
        shift = 0.5 if name.endswith("running_var") else 0.0
        return torch.rand(spec.shape, generator=generator, dtype=spec.dtype) + shift
    if name.startswith("hyper."):
        return torch.full(spec.shape, 0.1, dtype=spec.dtype)
    scale = 1.0 if name.startswith("batch.") else _USUAL
    around = 1.0 if len(spec.shape) == 1 and name.startswith(_WEIGHTS) and name.endswith(".weight") else 0.0
    return around + torch.randn(spec.shape, generator=generator, dtype=spec.dtype) * scale


def _near(name: str, values: Tensor, generator: torch.Generator) -> Tensor:
    """Return values that the model can have: code may take a root or a logarithm of them, or divide by them.

    A buffer is a constant of the model, except for the statistics of batch norm, which start at 0 and 1.
    """
    is_parameter = isinstance(values, nn.Parameter)
    values = values.detach().cpu().clone(memory_format=torch.contiguous_format)
    if not values.is_floating_point() or not values.numel() or not values.isfinite().all():
        return values
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype)
    if name.endswith("running_mean"):
        return values + _USUAL * noise
    if name.endswith("running_var"):
        return values * (1.0 + _NEAR * noise).abs()
    if not is_parameter:
        return values
    magnitude = values.square().mean().sqrt()
    if not magnitude:
        return _USUAL * noise
    if magnitude < _SMALL:
        values, magnitude = values * (_USUAL / magnitude), torch.full((), _USUAL, dtype=values.dtype)
    return values + _NEAR * noise * torch.where(values == 0, magnitude, values.abs())


def is_open(spec: TensorSpec) -> bool:
    """Return True if nothing is known of the values of samples."""
    return spec.below is None and spec.dtype not in (torch.bool, torch.uint8) and bool(spec.shape)


def widened(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """Return samples of several magnitudes: floats row by row, whole numbers entry by entry."""
    if spec.dtype.is_floating_point:
        drawn = torch.randn(spec.shape, generator=generator, dtype=spec.dtype)
        rows = torch.tensor(_MAGNITUDES, dtype=spec.dtype)[torch.arange(spec.shape[0]) % len(_MAGNITUDES)]
        return drawn * rows.reshape(-1, *[1] * (len(spec.shape) - 1))
    largest = torch.tensor([min(each, torch.iinfo(spec.dtype).max) for each in _WHOLE])
    most = largest[torch.randint(0, len(_WHOLE), spec.shape, generator=generator)]
    return ((2 * torch.rand(spec.shape, generator=generator, dtype=torch.float64) - 1) * most).to(spec.dtype)
