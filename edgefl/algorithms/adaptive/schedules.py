"""Step sizes and momentum parameters of recursive-momentum methods, per iteration, in double precision.

``eta(t)`` is the step size of iteration t = 0, 1, 2, ...; t = 0 is the first step, in the opening exchange. ``alpha(t)``
is the weight of the fresh gradient at t >= 1. A schedule may compute it from the step size of t - 1, but not of t, because
alpha is fixed before the step of its iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from edgefl.errors import ConfigError

DecayUnit = Literal["iteration", "epoch"]


class StepSizePlan(Protocol):
    """Interface of a schedule: ``eta(t)`` is the step size of iteration t, ``alpha(t)`` the weight of its fresh
    gradient.
    """

    def eta(self, t: int) -> float: ...
    def alpha(self, t: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """Schedule with eta_t = ``size`` and alpha_t = ``fresh`` for every t.

    Raises:
        ConfigError: ``size`` is not above 0, or ``fresh`` is outside (0, 1].
    """

    size: float
    fresh: float

    def __post_init__(self) -> None:
        check_positive("the step size lr", self.size)
        check_weight("alpha", self.fresh)

    def eta(self, t: int) -> float:
        return self.size

    def alpha(self, t: int) -> float:
        return self.fresh


@dataclass(frozen=True)
class Decaying:
    """Schedule with eta_t = ``size`` / (``w`` + ``sigma``^2 u)^(1/3), where u = t, or the epoch of iteration t, counted
    from 0.

    alpha_t = ``fresh``. With ``c`` it is STEM's own coupling, min(1, c eta_{t-1}^2). FAFED's language model has size
    = rho h = 1, w = sigma = 1, by iteration; STEM's has size = 20, by epoch.

    Attributes:
        size: Factor of the step size, above 0.
        fresh: alpha_t, in (0, 1]; unused with ``c``.
        w: Offset, above 0.
        sigma: Factor of u, above 0.
        unit: u counts "iteration" or "epoch".
        epoch_steps: Iterations of an epoch, for unit "epoch".
        c: Factor of STEM's coupling. None: alpha_t is constant.

    Raises:
        ConfigError: ``unit`` is "epoch" without ``epoch_steps``, or a number is out of range.
    """

    size: float
    fresh: float
    w: float = 1.0
    sigma: float = 1.0
    unit: DecayUnit = "iteration"
    epoch_steps: int | None = None
    c: float | None = None

    def __post_init__(self) -> None:
        check_positive("the step size lr", self.size)
        check_positive("w", self.w)
        check_positive("sigma", self.sigma)
        check_weight("alpha", self.fresh)
        if self.c is not None:
            check_positive("c", self.c)
        if self.unit == "epoch" and (self.epoch_steps is None or self.epoch_steps < 1):
            raise ConfigError(
                f"decay by epoch needs epoch_steps, the local steps of one pass over the data, at least 1; found "
                f"{self.epoch_steps}",
                epoch_steps=self.epoch_steps,
            )

    def eta(self, t: int) -> float:
        passed = t if self.unit == "iteration" else max(t - 1, 0) // (self.epoch_steps or 1)
        return self.size / math.cbrt(self.w + self.sigma**2 * passed)

    def alpha(self, t: int) -> float:
        return self.fresh if self.c is None else min(1.0, self.c * self.eta(t - 1) ** 2)


@dataclass(frozen=True)
class TheorySteps:
    """FAFED's schedule of Theorem 2, with the corrections of fafed.md 8.7.

    ::

        h       = N^(2/3) / L;
        w_t     = max(w, 1728 L^3 q^3 h^3 - t),  w = 3/2;
        eta_t   = rho h / (w_t + t)^(1/3)                          <= rho / (12 L q);
        c       = 1 / (12 L q h^3 rho^2) + 60 L^2 / (b N rho^2);
        alpha_t = c eta_{t-1}^2.

    Attributes:
        smoothness: L, a bound on the curvature of the loss.
        devices: N, the number of devices.
        steps: q, the iterations of an exchange (round trip between server and device).
        batch: b, the samples per iteration.
        rho: Number added to sqrt(v).
        h: h. None: N^(2/3) / L.
        w: Smallest w_t.

    Raises:
        ConfigError: A number is not above 0, or alpha would leave (0, 1).
    """

    smoothness: float
    devices: int
    steps: int
    batch: int
    rho: float
    h: float | None = None
    w: float = 1.5

    def __post_init__(self) -> None:
        for name in ("smoothness", "devices", "steps", "batch", "rho", "scale", "w"):
            check_positive("h" if name == "scale" else name, getattr(self, name))
        largest = self.c * self.eta(0) ** 2
        if largest >= 1.0:
            raise ConfigError(
                f"with these numbers alpha begins at {largest:g}, and it lies below 1: lower rho or h, or raise the "
                "number of local steps",
                alpha=largest,
            )

    @property
    def scale(self) -> float:
        """The number h of the schedule: ``h``, or N^(2/3) / L."""
        return self.devices ** (2 / 3) / self.smoothness if self.h is None else self.h

    @property
    def c(self) -> float:
        L, q, h, rho = self.smoothness, self.steps, self.scale, self.rho
        return 1 / (12 * L * q * h**3 * rho**2) + 60 * L**2 / (self.batch * self.devices * rho**2)

    @property
    def flat(self) -> float:
        """Bound 1728 L^3 q^3 h^3 of t + w. While t + w is below it, eta is constant."""
        return 1728 * (self.smoothness * self.steps * self.scale) ** 3

    def eta(self, t: int) -> float:
        return self.rho * self.scale / math.cbrt(max(self.w + t, self.flat))

    def alpha(self, t: int) -> float:
        return self.c * self.eta(t - 1) ** 2


def check_positive(name: str, value: float) -> None:
    """Raise ConfigError, with the option's ``name``, unless ``value`` is a finite number above 0."""
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(
            f"{name} is a finite number above 0, found {value}; choose one", name=name, value=value, above=0
        )


def check_weight(name: str, value: float) -> None:
    """Raise ConfigError, with the option's ``name``, unless ``value`` lies in (0, 1]."""
    if not 0 < value <= 1:
        raise ConfigError(
            f"{name}, the weight of the fresh gradient, lies above 0 and at most at 1, found {value}; 1 is plain SGD",
            name=name,
            value=value,
        )
