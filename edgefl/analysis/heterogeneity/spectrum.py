"""Extreme eigenvalues of a symmetric operator that is known by its products with vectors (Lanczos)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STEPS = 20
_EXHAUSTED = 1e-7
"""What is left of a product beside those before it, relative to the product, once there is nothing new in it."""


def extremes(
    product: Callable[[Tensor], Tensor], like: Tensor, *, steps: int = STEPS, seed: int = 0
) -> tuple[float, float]:
    """(smallest, largest) eigenvalue, as ``steps`` products tell them: never outside the true range, up to round-off.

    ``like`` (d,) gives the vectors' size and dtype. All directions are kept and each new one made orthogonal to them,
    so it takes ``steps`` times d numbers, and is exact for d <= ``steps``.
    """
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    direction /= direction.norm()
    basis = like.new_zeros(min(steps, like.numel()), like.numel())
    diagonal: list[float] = []
    beside: list[float] = []
    for step in range(len(basis)):
        basis[step] = direction
        image = product(direction)
        scale = float(image.norm())
        diagonal.append(float(direction @ image))
        known = basis[: step + 1]
        for _ in range(2):  # once leaves what round-off put back
            image = image - known.T @ (known @ image)
        left = float(image.norm())
        if left <= _EXHAUSTED * scale or step + 1 == len(basis):
            break
        beside.append(left)
        direction = image / left
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    off = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
    matrix += torch.diag(off, 1) + torch.diag(off, -1)
    values = torch.linalg.eigvalsh(matrix)
    return float(values[0]), float(values[-1])


def largest_magnitude(
    product: Callable[[Tensor], Tensor], like: Tensor, *, steps: int = STEPS, seed: int = 0
) -> float:
    """The spectral norm: the larger of the two extremes without sign."""
    return max(map(abs, extremes(product, like, steps=steps, seed=seed)))
