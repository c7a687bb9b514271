"""How different the users' gradients are at one point, and how much of it is the noise of few samples (6.6 c)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.analysis.heterogeneity.losses import Batch, Losses


class Spread:
    """The mean of vectors, and the mean of <a_i - abar, b_i - bbar> over pairs of them, added one by one (Welford).

    With a = b it is the mean squared distance from the mean, exactly 0 for equal vectors.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: tuple[Tensor, Tensor] | None = None
        self._sum = 0.0

    def add(self, first: Tensor, second: Tensor | None = None) -> None:
        a = first.to(torch.float64)
        b = a if second is None else second.to(torch.float64)
        self.count += 1
        if self.mean is None:
            self.mean = (a.clone(), b.clone())
            return
        away = a - self.mean[0]
        self.mean = (self.mean[0] + away / self.count, self.mean[1] + (b - self.mean[1]) / self.count)
        self._sum += float(away @ (b - self.mean[1]))

    @property
    def value(self) -> float:
        return self._sum / max(self.count, 1)

    @property
    def mean_norm2(self) -> float:
        return 0.0 if self.mean is None else float(self.mean[0] @ self.mean[0])


@dataclass(frozen=True, eq=False)
class UserGradient:
    """A user's gradient at a point, on all its samples and on two disjoint halves, flat (d,).

    ``variance`` is s_i^2, the trace of the per-sample gradients' covariance, ``largest`` the largest norm of a batch's.
    """

    mean: Tensor
    halves: tuple[Tensor, Tensor]
    variance: float
    largest: float
    samples: int


def user_gradient(losses: Losses, at: Tensor, parts: Sequence[Batch]) -> UserGradient:
    """From the gradients of the user's batches (two at least).

    With K batches of b_k samples, sum_k b_k ||g_k - gbar||^2 / (K - 1) is an unbiased estimate of s_i^2, and s_i^2
    itself, with m - 1 below, for batches of one sample.
    """
    sums = [torch.zeros_like(at, dtype=torch.float64) for _ in range(2)]
    rows, squares, largest = [0, 0], 0.0, 0.0
    for number, part in enumerate(parts):
        gradient = losses.gradient(at, part).to(torch.float64)
        sums[number % 2] += gradient * part.size
        rows[number % 2] += part.size
        norm2 = float(gradient @ gradient)
        squares += part.size * norm2
        largest = max(largest, norm2**0.5)
    mean = (sums[0] + sums[1]) / sum(rows)
    between = max(squares - sum(rows) * float(mean @ mean), 0.0)
    return UserGradient(
        mean=mean.to(at.dtype),
        halves=(sums[0] / rows[0], sums[1] / rows[1]),
        variance=between / (len(parts) - 1),
        largest=largest,
        samples=sum(rows),
    )


@dataclass(frozen=True)
class GradientReport:
    """Dissimilarity of n users' gradients g_i at one point.

    ``plug_in`` is (1/n) sum ||g_i - gbar||^2, which noise makes positive for users that are alike, by ``noise_floor`` =
    (1 - 1/n) (1/n) sum s_i^2 / m_i on average. ``unbiased`` is (1/n) sum <g_i^a - gbar^a, g_i^b - gbar^b> over disjoint
    halves a, b of each user's samples: 0 on average for users that are alike, so it may come out below 0. ``largest`` is
    the largest norm of a batch's gradient, ``variance`` the largest s_i^2 of a user, ``norms`` (n,) are those of the g_i.
    """

    plug_in: float
    noise_floor: float
    unbiased: float
    mean_norm2: float
    largest: float
    variance: float
    norms: tuple[float, ...]

    @property
    def ratio(self) -> float | None:
        """gG^2 / ||gbar||^2; None where the mean gradient is 0."""
        return self.plug_in / self.mean_norm2 if self.mean_norm2 else None


class Gradients:
    """Adds the users up one by one, so that no two gradients are in memory."""

    def __init__(self) -> None:
        self._whole, self._halves = Spread(), Spread()
        self._noise, self._largest, self._variance = 0.0, 0.0, 0.0
        self._norms: list[float] = []

    def add(self, found: UserGradient) -> None:
        self._whole.add(found.mean)
        self._halves.add(*found.halves)
        self._noise += found.variance / found.samples
        self._largest = max(self._largest, found.largest)
        self._variance = max(self._variance, found.variance)
        self._norms.append(float(found.mean.norm()))

    def report(self) -> GradientReport:
        count = max(len(self._norms), 1)
        return GradientReport(
            plug_in=self._whole.value,
            noise_floor=(1 - 1 / count) * self._noise / count,
            unbiased=self._halves.value,
            mean_norm2=self._whole.mean_norm2,
            largest=self._largest,
            variance=self._variance,
            norms=tuple(self._norms),
        )


@dataclass(frozen=True)
class AdaptationReport:
    """``kappas`` (n,) of the users and the measured ``gamma_f2`` = (1/n) sum ||grad F_i - grad F||^2."""

    kappas: tuple[float, ...]
    gamma_f2: float
    # ||grad F(w)||^2, which training brings down.
    mean_norm2: float
    largest: float


@dataclass(frozen=True, eq=False)
class Adapted:
    """One user at the point that an inner step of its own leads to.

    ``kappa`` = alpha ||H_i(w) g|| / ||g|| with g = grad f_i(w - alpha grad f_i(w)): the relative error of leaving the
    Hessian out, as FO does. ``meta`` = (I - alpha H_i(w)) g is grad F_i(w) (eq. 5), ``norm`` is ||g||.
    """

    kappa: float
    meta: Tensor
    norm: float


def adapted(losses: Losses, own: Tensor, parts: Sequence[Batch], alpha: float) -> Adapted:
    """``own`` is the user's gradient at the losses' weights w, flat; ``parts`` are all its samples."""
    at = losses.start
    there = at - alpha * own
    outer = losses.mean(lambda part: losses.gradient(there, part), parts)
    curved = alpha * losses.mean(lambda part: losses.product(at, outer, part), parts)
    norm = float(outer.norm())
    return Adapted(float(curved.norm()) / norm if norm else 0.0, outer - curved, norm)


class Adaptations:
    """Adds users up one by one."""

    def __init__(self) -> None:
        self._spread = Spread()
        self._kappas: list[float] = []
        self._largest = 0.0

    def add(self, found: Adapted) -> None:
        self._spread.add(found.meta)
        self._kappas.append(found.kappa)
        self._largest = max(self._largest, found.norm)

    def report(self) -> AdaptationReport:
        return AdaptationReport(
            tuple(self._kappas), self._spread.value, self._spread.mean_norm2, self._largest
        )
