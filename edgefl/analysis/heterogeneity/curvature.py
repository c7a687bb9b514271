"""Gradient and Hessian dissimilarity of users, and local constants of their curvature (per_fedavg.md 6.6 b to f)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.analysis.heterogeneity.losses import FlatLoss, Shard, ShardBatch, batches

PROBES = 4
"""Random directions of Hutchinson's estimate."""

Progress = Callable[[str], None]
"""Receiver of the name of each step of a long computation."""


@dataclass(frozen=True)
class CurvatureReport:
    """Curvature of the examined users' losses f_i; f is the mean over these users.

    Attributes:
        users: numbers of the examined users.
        eigenvalues: (smallest, largest) eigenvalue of each H_i = Hess f_i.
        gamma_h2: (1/n) sum ||H_i - Hess f||^2, spectral norms.
        rho: the largest ||H_i(w') - H_i(w)|| / ||w' - w|| over an inner step from w to w'.
        sigma_h2: the largest user's E||Hess l - H_i||^2 in the Frobenius norm (Hutchinson), an upper bound of the
            spectral one.
    """

    users: tuple[int, ...]
    eigenvalues: tuple[tuple[float, float], ...]
    gamma_h2: float
    rho: float
    sigma_h2: float

    @property
    def largest(self) -> float:
        """Largest magnitude of an eigenvalue of any examined user."""
        return max(max(map(abs, pair)) for pair in self.eigenvalues)


@dataclass(frozen=True, eq=False)
class ExaminedUser:
    """User whose Hessian is examined.

    Attributes:
        number: number of the user.
        shard: its samples.
        gradient: gradient (d,) of its loss at the initial weights.
    """

    number: int
    shard: Shard
    gradient: Tensor


Operator = Callable[[Tensor], Tensor]


def curvature_report(
    losses: FlatLoss, users: Sequence[ExaminedUser], alpha: float, on_progress: Progress = lambda _: None
) -> CurvatureReport:
    """Measure the curvature of users' losses by Lanczos iterations.

    An eigenvalue takes 20 Hessian-vector products of one user. A step of gamma_H takes one product of every user.

    Args:
        losses: the objective's loss and weights.
        users: the examined users.
        alpha: inner step size.
        on_progress: receives the name of each step.

    Returns:
        Eigenvalues, gamma_H^2, rho and sigma_H^2.
    """
    at = losses.start
    hessians = [_hessian(losses, user, at) for user in users]

    def from_mean(place: int) -> Operator:
        def product(vector: Tensor) -> Tensor:
            images = torch.stack([hessian(vector) for hessian in hessians])
            return images[place] - images.mean(dim=0)

        return product

    spectra, apart, rho, noise = [], 0.0, 0.0, 0.0
    for place, (user, own) in enumerate(zip(users, hessians, strict=True)):
        on_progress(f"curvature of user {place + 1} of {len(users)}")
        spectra.append(extremes(own, at))
        if len(users) > 1:
            apart += largest_magnitude(from_mean(place), at) ** 2 / len(users)
        step = alpha * user.gradient
        if (distance := float(step.norm())) > 0.0:
            there = _hessian(losses, user, at - step)
            rho = max(rho, largest_magnitude(_change(own, there), at) / distance)
        noise = max(noise, hessian_variance(losses, batches(user.shard, user.number)))
    return CurvatureReport(tuple(user.number for user in users), tuple(spectra), apart, rho, noise)


def _hessian(losses: FlatLoss, user: ExaminedUser, at: Tensor) -> Operator:
    """Return the operator v -> H_i(at) v for the Hessian of ``user`` at the point ``at``, on all its samples in one
    batch.
    """
    whole = ShardBatch(0, *user.shard)
    return lambda vector: losses.product(at, vector, whole)


def _change(before: Operator, after: Operator) -> Operator:
    return lambda vector: after(vector) - before(vector)


def hessian_variance(losses: FlatLoss, parts: Sequence[ShardBatch]) -> float:
    """Estimate E||Hess l - H||_F^2 over a user's samples: E over signs z of E||(Hess l - H) z||^2 (Hutchinson).

    For K batches of b_k samples, sum_k b_k ||H_k z - Hbar z||^2 / (K - 1) estimates the inner mean without bias.

    Args:
        losses: the objective's loss and weights.
        parts: the user's samples, in at least two batches.

    Returns:
        The mean over :data:`PROBES` random directions z.
    """
    at, rows = losses.start, sum(part.size for part in parts)
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(PROBES):
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
    return total / PROBES / (len(parts) - 1)


STEPS = 20
"""Largest number of products."""
_EXHAUSTED = 1e-7
"""Residual of a product, relative to the product, below which it holds no new direction."""


def extremes(product: Operator, like: Tensor) -> tuple[float, float]:
    """Estimate the (smallest, largest) eigenvalue of a symmetric operator by the Lanczos method.

    The estimates stay inside the true range, up to round-off, and are exact for d <= STEPS. Each direction is
    orthogonalized against all earlier ones, so it takes STEPS times d numbers.

    Args:
        product: the operator, (d,) -> (d,).
        like: a vector (d,) with the size and dtype of the operator's.

    Returns:
        The smallest and the largest eigenvalue.
    """
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    direction /= direction.norm()
    basis = like.new_zeros(min(STEPS, like.numel()), like.numel())
    diagonal: list[float] = []
    off_diagonal: list[float] = []
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
        off_diagonal.append(left)
        direction = image / left
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    off = torch.tensor(off_diagonal[: len(diagonal) - 1], dtype=torch.float64)
    matrix += torch.diag(off, 1) + torch.diag(off, -1)
    values = torch.linalg.eigvalsh(matrix)
    return float(values[0]), float(values[-1])


def largest_magnitude(product: Operator, like: Tensor) -> float:
    """Return the spectral norm of a symmetric operator: the larger magnitude of its two extreme eigenvalues.

    Args:
        product: the operator, (d,) -> (d,).
        like: a vector (d,) with the size and dtype of the operator's.
    """
    return max(map(abs, extremes(product, like)))


class RunningSpread:
    """Accumulator of pairs of vectors (a_i, b_i). ``mean`` is the pair of their means, ``value`` the mean of <a_i -
    abar, b_i - bbar> (Welford).

    If b_i = a_i, ``value`` is the mean squared distance from the mean, exactly 0 for equal vectors.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: tuple[Tensor, Tensor] | None = None
        self._sum = 0.0

    def add(self, first: Tensor, second: Tensor | None = None) -> None:
        """Add the pair (``first``, ``second``). Without ``second``, add ``first`` twice, as a_i and as b_i."""
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
        """Squared norm of the mean of the first vectors a_i of all pairs; 0 before the first pair."""
        return 0.0 if self.mean is None else float(self.mean[0] @ self.mean[0])


@dataclass(frozen=True, eq=False)
class UserGradient:
    """Gradients of a user's loss at a point, with estimates of their noise.

    Attributes:
        mean: gradient (d,) on all samples of the user.
        halves: gradients (d,) on two disjoint halves of the samples.
        variance: s_i^2, the trace of the covariance of per-sample gradients.
        largest: the largest norm of a batch's gradient.
        samples: number of samples.
    """

    mean: Tensor
    halves: tuple[Tensor, Tensor]
    variance: float
    largest: float
    samples: int


def user_gradient(losses: FlatLoss, at: Tensor, parts: Sequence[ShardBatch]) -> UserGradient:
    """Compute the gradient of a user's loss at a point, and estimates of its noise, batch by batch.

    For K batches of b_k samples, sum_k b_k ||g_k - gbar||^2 / (K - 1) is an unbiased estimate of s_i^2, and s_i^2
    itself for batches of one sample (with the divisor m - 1).

    Args:
        losses: the objective's loss.
        at: the point, flat (d,).
        parts: the user's samples, in at least two batches.

    Returns:
        The gradient on all samples, the gradients on two halves, and the estimates.
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
class GradientDissimilarity:
    """Dissimilarity of n users' gradients g_i at one point.

    Attributes:
        plug_in: (1/n) sum ||g_i - gbar||^2, which noise makes positive for equal users.
        noise_floor: (1 - 1/n) (1/n) sum s_i^2 / m_i, the mean of ``plug_in`` for equal users.
        unbiased: (1/n) sum <g_i^a - gbar^a, g_i^b - gbar^b> over disjoint halves a, b of each user's samples; 0 on
            average for equal users, so it may be negative.
        mean_norm2: ||gbar||^2.
        largest: the largest norm of a batch's gradient.
        variance: the largest s_i^2 of a user.
        norms: ||g_i|| per user, (n,).
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
        """``plug_in`` / ||gbar||^2, or None if the mean gradient is 0."""
        return self.plug_in / self.mean_norm2 if self.mean_norm2 else None


class GradientAccumulator:
    """Accumulator of users' gradients, which holds one user's gradient in memory at a time."""

    def __init__(self) -> None:
        self._whole, self._halves = RunningSpread(), RunningSpread()
        self._noise, self._largest, self._variance = 0.0, 0.0, 0.0
        self._norms: list[float] = []

    def add(self, found: UserGradient) -> None:
        self._whole.add(found.mean)
        self._halves.add(*found.halves)
        self._noise += found.variance / found.samples
        self._largest = max(self._largest, found.largest)
        self._variance = max(self._variance, found.variance)
        self._norms.append(float(found.mean.norm()))

    def report(self) -> GradientDissimilarity:
        """Return the report on the users that were added so far."""
        count = max(len(self._norms), 1)
        return GradientDissimilarity(
            plug_in=self._whole.value,
            noise_floor=(1 - 1 / count) * self._noise / count,
            unbiased=self._halves.value,
            mean_norm2=self._whole.mean_norm2,
            largest=self._largest,
            variance=self._variance,
            norms=tuple(self._norms),
        )


@dataclass(frozen=True)
class AdaptationSummary:
    """Summary over users after an inner step.

    Attributes:
        kappas: kappa of each user (:class:`AdaptedUser`), (n,).
        gamma_f2: (1/n) sum ||grad F_i - grad F||^2.
        mean_norm2: ||grad F||^2, the squared norm of the mean meta-gradient.
        largest: the largest norm of an outer gradient.
    """

    kappas: tuple[float, ...]
    gamma_f2: float
    # ||grad F(w)||^2, which training brings down.
    mean_norm2: float
    largest: float


@dataclass(frozen=True, eq=False)
class AdaptedUser:
    """Meta-gradient of one user after an inner step.

    Attributes:
        kappa: alpha ||H_i(w) g|| / ||g|| with g = grad f_i(w - alpha grad f_i(w)): the relative error of the
            first-order estimator (FO), which omits the Hessian.
        meta: (I - alpha H_i(w)) g, which is grad F_i(w) (eq. 5).
        norm: ||g||.
    """

    kappa: float
    meta: Tensor
    norm: float


def adapt_user(losses: FlatLoss, own: Tensor, parts: Sequence[ShardBatch], alpha: float) -> AdaptedUser:
    """Compute a user's meta-gradient and kappa (eq. 5).

    Args:
        losses: the objective's loss and weights w.
        own: the user's gradient at w, flat (d,).
        parts: all the user's samples.
        alpha: inner step size.

    Returns:
        kappa, the meta-gradient and the norm of the outer gradient.
    """
    at = losses.start
    there = at - alpha * own
    outer = losses.mean(lambda part: losses.gradient(there, part), parts)
    curved = alpha * losses.mean(lambda part: losses.product(at, outer, part), parts)
    norm = float(outer.norm())
    return AdaptedUser(float(curved.norm()) / norm if norm else 0.0, outer - curved, norm)


class AdaptationAccumulator:
    """Accumulator of :class:`AdaptedUser` over users, for an :class:`AdaptationSummary`."""

    def __init__(self) -> None:
        self._spread = RunningSpread()
        self._kappas: list[float] = []
        self._largest = 0.0

    def add(self, found: AdaptedUser) -> None:
        self._spread.add(found.meta)
        self._kappas.append(found.kappa)
        self._largest = max(self._largest, found.norm)

    def report(self) -> AdaptationSummary:
        return AdaptationSummary(
            tuple(self._kappas), self._spread.value, self._spread.mean_norm2, self._largest
        )
