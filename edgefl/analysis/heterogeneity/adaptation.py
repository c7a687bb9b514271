"""What one inner step meets at each user: kappa, and how different the users' meta-gradients are (6.6 e, g)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from edgefl.analysis.heterogeneity.gradients import Spread
from edgefl.analysis.heterogeneity.losses import Batch, Losses


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
