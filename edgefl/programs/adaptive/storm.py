"""Recursive momentum on many devices (STORM, Cutkosky and Orabona 2019): what STEM and FAFED share.

Iteration t of device i, with ONE batch and one dropout mask for both gradients, and A = 1 unless adaptive::

    gn = grad f_i(x_t; B)            go = grad f_i(x_{t-1}; B)
    m  = gn + (1 - alpha_t) (m - ext go)
    v  = beta v + (1 - beta) gn^2                    (adaptive; or another v of edgefl.programs.adaptive.second_moment)
    x_{t+1} = x_t - eta_t m / A

An exchange has the iterations t = (r-1) q + 1 .. r q. The device sends x_t, m and v *before* the step of the last one,
which the server makes for all with the averages: v first, A = sqrt(v) + rho from it, and then x - eta_t m / A. Until the
next exchange A stays as it is. What a device keeps for itself is x_{t-1}: after an exchange that is its OWN x_t of
before, not the average (fafed.md 8.3). The opening exchange is iteration 0: gradients at x_0, and the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from edgefl.contract.program import CarryRule, Phase, Program
from edgefl.contract.schedule import Scalars
from edgefl.contract.server import ServerOpt, beside, state_of
from edgefl.contract.tensors import Tensors
from edgefl.objective.objective import Objective
from edgefl.objective.parts import evaluate
from edgefl.programs.adaptive.recursive import Recursion, scaled
from edgefl.programs.adaptive.schedules import Steps, positive
from edgefl.programs.adaptive.second_moment import SecondMoment, fresh
from edgefl.wire.errors import ConfigError

FirstStep = Literal["preconditioned", "plain"]


@dataclass(frozen=True)
class Storm:
    """One method of the family, on ``objective``.

    ``steps`` is q. ``opening_steps`` batches make the gradient of the opening exchange. ``clip``: the norm over all
    tensors that a gradient is scaled down to; the factor comes from the gradient at the new point and acts on both,
    because two factors would break what their difference cancels (fafed.md 8.11). ``ext``: what the old gradient is
    multiplied by, 1 in the paper; public code of FAFED has it, with 0.95 for images and 1 for its language model. At 0,
    m is a heavy ball. ``adaptive`` holds beta and rho, and is empty where A = 1; ``second_moment`` says what v is made of.
    ``announced``: the options of the method that ``schedule`` is made of.
    """

    name: str
    objective: Objective
    schedule: Steps
    batch: int
    steps: int
    opening_steps: int | None = None
    eval_batch: int | None = None
    clip: float | None = None
    ext: float = 1.0
    adaptive: Mapping[str, float] = field(default_factory=dict)
    first_step: FirstStep = "preconditioned"
    second_moment: SecondMoment = "elementwise"
    announced: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "opening_steps", "eval_batch"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigError(
                    f"{self.name}: {name} is at least 1, found {count}; raise it", name=name, value=count
                )
        if self.clip is not None:
            positive(f"{self.name}: clip", self.clip)
        if not 0 <= self.ext <= 1:
            raise ConfigError(
                f"{self.name}: ext, the weight of the old gradient, lies in [0, 1], found {self.ext}; the paper's method "
                "has 1",
                ext=self.ext,
            )

    def program(self) -> Program:
        """The exchange that repeats, with the opening one before it."""
        device, state = self._device, dict.fromkeys(self._device.shared, 0.0)
        check = evaluate(self.objective, self.eval_batch or self.batch)
        opening = Program(
            name=self.name,
            start=device.open(),
            phases=(Phase("gather", device.gather(), device.opening_steps),),
            finish=device.opened(),
            evaluate=check,
            hyper={"eta": self.schedule.eta(0), **self.adaptive},
            server=ServerOpt(
                f"{self.name} opening", state, self._first, self._unfolded, frozenset({"first_step"})
            ),
            carry_rule=CarryRule(exchanges=1),
            whole=True,
        )
        return Program(
            name=self.name,
            start=device.start(),
            phases=(Phase("train", device.train(), self.steps),),
            finish=device.finish(),
            evaluate=check,
            hyper=self._announced(1, 1),
            schedule=self._announced,
            announced=self.announced,
            server=ServerOpt(self.name, state, self._advanced),
            opening=(opening,),
            carry_rule=CarryRule(exchanges=1, needed=True),
            whole=True,
        )

    @property
    def _device(self) -> Recursion:
        first = self.steps if self.opening_steps is None else self.opening_steps
        second = self.second_moment if self.adaptive else None
        return Recursion(self.objective, self.batch, self.steps, first, second, self.clip)

    def _announced(self, position: int, _rounds: int) -> Scalars:
        """eta.1 .. eta.q and alpha.1 .. alpha.q of an exchange's iterations, beside the scalars that never change."""
        done = (position - 1) * self.steps  # the opening exchange is iteration 0
        numbers = range(1, self.steps + 1)
        etas = {f"eta.{k}": self.schedule.eta(done + k) for k in numbers}
        alphas = {f"alpha.{k}": self.schedule.alpha(done + k) for k in numbers}
        return {**etas, **alphas, "ext": self.ext, **self.adaptive}

    def _unfolded(self, update: Tensors) -> Tensors:
        """v_0 is the mean of squares, not the square of a mean, and follows from what was sent."""
        if not self.adaptive:
            return update
        return update | beside("v", fresh(self.second_moment, state_of(update, "m")))

    def _first(self, _before: Tensors, mean: Tensors, hyper: Scalars) -> Tensors:
        return stepped(mean, hyper["eta"], hyper.get("rho") if self.first_step == "preconditioned" else None)

    def _advanced(self, _before: Tensors, mean: Tensors, hyper: Scalars) -> Tensors:
        return stepped(mean, hyper[f"eta.{self.steps}"], hyper.get("rho"))


def stepped(mean: Tensors, eta: float, rho: float | None) -> Tensors:
    """x - eta m / A for every x that has an m; A = sqrt(v) + rho, or 1 without ``rho``."""
    v = state_of(mean, "v")
    return {
        name: mean[name] - eta * (m if rho is None else m / scaled(v[name], rho))
        for name, m in state_of(mean, "m").items()
    }
