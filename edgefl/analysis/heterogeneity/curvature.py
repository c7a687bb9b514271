"""How different the users' Hessians are, and the local constants of their curvature (per_fedavg.md 6.6 d, f)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.analysis.heterogeneity.losses import Batch, Losses, Shard, batches

PROBES = 4
"""Random directions of Hutchinson's estimate."""

Told = Callable[[str], None]
"""Told what is being computed, for people who wait."""


@dataclass(frozen=True)
class CurvatureReport:
    """Of the ``users`` that were examined (their numbers); f is the mean over them.

    ``eigenvalues``: smallest and largest of H_i = Hess f_i. ``gamma_h2`` = (1/n) sum ||H_i - Hess f||^2, spectral norms.
    ``rho`` is the largest ||H_i(w') - H_i(w)|| / ||w' - w|| over an inner step from w to w'. ``sigma_h2`` is the largest
    user's E||Hess l - H_i||^2 in the Frobenius norm (Hutchinson), which is above the spectral one.
    """

    users: tuple[int, ...]
    eigenvalues: tuple[tuple[float, float], ...]
    gamma_h2: float
    rho: float
    sigma_h2: float

    @property
    def largest(self) -> float:
        """The largest magnitude of an eigenvalue."""
        return max(max(map(abs, pair)) for pair in self.eigenvalues)


@dataclass(frozen=True, eq=False)
class Examined:
    """A user whose Hessian is examined: its number, samples, and gradient at the losses' weights."""

    number: int
    shard: Shard
    gradient: Tensor


Operator = Callable[[Tensor], Tensor]


def curvature_report(
    losses: Losses, users: Sequence[Examined], alpha: float, told: Told = lambda _: None
) -> CurvatureReport:
    """20 Lanczos steps for each eigenvalue; a step of gamma_H takes a product of every user."""
    at = losses.start
    hessians = [_hessian(losses, user, at) for user in users]

    def from_mean(place: int) -> Operator:
        def product(vector: Tensor) -> Tensor:
            images = torch.stack([hessian(vector) for hessian in hessians])
            return images[place] - images.mean(dim=0)

        return product

    spectra, apart, rho, noise = [], 0.0, 0.0, 0.0
    for place, (user, own) in enumerate(zip(users, hessians, strict=True)):
        told(f"curvature of user {place + 1} of {len(users)}")
        spectra.append(extremes(own, at))
        if len(users) > 1:
            apart += largest_magnitude(from_mean(place), at) ** 2 / len(users)
        step = alpha * user.gradient
        if (distance := float(step.norm())) > 0.0:
            there = _hessian(losses, user, at - step)
            rho = max(rho, largest_magnitude(_change(own, there), at) / distance)
        noise = max(noise, hessian_variance(losses, batches(user.shard, user.number)))
    return CurvatureReport(tuple(user.number for user in users), tuple(spectra), apart, rho, noise)


def _hessian(losses: Losses, user: Examined, at: Tensor) -> Operator:
    """v -> H_i(at) v, on all the user's samples in one batch."""
    whole = Batch(0, *user.shard)
    return lambda vector: losses.product(at, vector, whole)


def _change(before: Operator, after: Operator) -> Operator:
    return lambda vector: after(vector) - before(vector)


def hessian_variance(losses: Losses, parts: Sequence[Batch], *, probes: int = PROBES, seed: int = 0) -> float:
    """E||Hess l - H||_F^2 over a user's samples: E over signs z of E||(Hess l - H) z||^2 (Hutchinson).

    Of K batches of b_k samples each, sum_k b_k ||H_k z - Hbar z||^2 / (K - 1) estimates the inner mean without bias.
    """
    at, rows = losses.start, sum(part.size for part in parts)
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    for _ in range(probes):
        signs = torch.randint(0, 2, at.shape, generator=generator).to(at.dtype) * 2 - 1
        images = [losses.product(at, signs, part).to(torch.float64) for part in parts]
        mean = sum(
            (image * (part.size / rows) for image, part in zip(images, parts, strict=True)),
            torch.zeros_like(at, dtype=torch.float64),
        )
        total += sum(
            part.size * float((image - mean).square().sum())
            for image, part in zip(images, parts, strict=True)
        )
    return total / probes / (len(parts) - 1)


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
