"""What Per-FedAvg's lemmas and theorem bound, measured on users of logistic regression (per_fedavg.md 6.3 to 6.5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from edgefl.analysis.heterogeneity import theory
from edgefl.analysis.heterogeneity.theory import TrainingSetting
from reproduce.entry import Points
from reproduce.per_fedavg.logistic import LANDSCAPE, SAMPLES, USERS, Local, Users, starting_point

EXACT, HF, FO = "exact", "hf", "fo"
MODES = (EXACT, HF, FO)
ALPHA, BATCH, RUNS, ACTIVE = 1.0, 8, 8, 5
"""Inner step; samples of a batch; repetitions whose mean stands for the expectation; users of a round."""
DELTA = 1e-3
DELTAS = tuple(2.0**-power for power in range(6))
DRIFT_TAU, DRIFT_RUNS = 16, 64
STEP = 0.2
"""beta is this times eps: with tau = eps^(-1/2) the theorem's condition is met from eps = 0.04 down."""
ESTIMATORS: Mapping[str, theory.Estimator] = {EXACT: theory.EXACT, HF: theory.HF, FO: theory.FO}


def local(mode: str, clients: int, *, batch: int = BATCH, inner: int | None = None) -> Local:
    """Steps of the algorithm in ``mode``; ``inner``: another size of the inner batch D."""
    reach = {"delta": DELTA} if mode == HF else {}
    return Local.of(clients, mode=mode, alpha=ALPHA, batch=batch, inner_batch=inner, **reach)


@dataclass(frozen=True)
class Meta:
    """Exact gradients of the users' F_i, for ``runs`` models at once."""

    users: Users
    runs: int
    steps: Local

    @classmethod
    def of(cls, users: Users, runs: int) -> Meta:
        return cls(users, runs, local(EXACT, runs * USERS, batch=SAMPLES))

    def each(self, w: Tensor) -> Tensor:
        """grad F_i(w) for w (runs, ...): (runs, users, ...)."""
        batches = whole(self.users, torch.arange(USERS).repeat(self.runs))
        return apart(self.steps.direction(w.repeat_interleave(USERS, 0), batches), USERS)

    def mean(self, w: Tensor) -> Tensor:
        """grad F(w), (runs, ...)."""
        return self.each(w).mean(1)


def apart(lanes: Tensor, each: int) -> Tensor:
    """(n * each, ...) as (n, each, ...)."""
    return lanes.reshape(-1, each, *lanes.shape[1:])


def whole(users: Users, who: Tensor, streams: Sequence[int] = (0, 1, 2)) -> dict[str, Tensor]:
    """All samples of clients that are the users ``who``, as each of the batches ``streams``."""
    rows = torch.arange(SAMPLES).expand(len(who), SAMPLES)
    return {name: each for stream in streams for name, each in users.batch(stream, who, rows).items()}


def drawn(users: Users, who: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Three independent batches of :data:`BATCH` samples of each client, with replacement."""
    return {
        name: each
        for stream in range(3)
        for name, each in users.batch(
            stream, who, torch.randint(SAMPLES, (len(who), BATCH), generator=generator)
        ).items()
    }


def bias(mode: str, users: Users, w: Tensor, inner: int) -> Tensor:
    """||E G - grad F_i|| of every user at one ``w`` (1, ...), exactly: over all inner batches of ``inner`` samples that can
    be drawn with replacement (``inner`` = all: the samples themselves), D' and D'' being all samples."""
    choices = (
        torch.arange(SAMPLES)[None]
        if inner == SAMPLES
        else torch.tensor(list(product(range(SAMPLES), repeat=inner)))
    )
    who = torch.arange(USERS).repeat_interleave(len(choices))
    batches = whole(users, who, (0, 2)) | users.batch(1, who, choices.repeat(USERS, 1))
    steps = local(mode, len(who), batch=SAMPLES, inner=inner)
    along = steps.direction(w.expand(len(who), *w.shape[1:]), batches)
    mean = apart(along, len(choices)).mean(1)
    length: Tensor = (mean - Meta.of(users, 1).each(w)[0]).flatten(1).norm(dim=1)
    return length


def delta_slope(users: Users, w: Tensor) -> tuple[float, Points]:
    """Of log ||G_HF - G_EXACT|| by log delta, on all samples, and the line."""
    who = torch.arange(USERS)
    lanes, batches = w.expand(USERS, *w.shape[1:]), whole(users, who)
    quotient, exact = local(HF, USERS, batch=SAMPLES), local(EXACT, USERS, batch=SAMPLES)
    away = [
        float((quotient.direction(lanes, batches, delta=delta) - exact.direction(lanes, batches)).norm())
        for delta in DELTAS
    ]
    return slope(DELTAS, away), list(zip(DELTAS, away, strict=True))


def drift(mode: str, users: Users, beta: float, generator: torch.Generator) -> list[float]:
    """E (1/n) sum ||w_i - wbar||^2 after steps 1, 2, ... of a round in which all users are active."""
    who = torch.arange(USERS).repeat(DRIFT_RUNS)
    steps, w, found = local(mode, len(who)), starting_point(len(who)), []
    for _ in range(DRIFT_TAU):
        w = steps.step(w, drawn(users, who, generator), lr=beta)
        lanes = apart(w, USERS).flatten(2)
        found.append(float(((lanes - lanes.mean(1, keepdim=True)) ** 2).sum(-1).mean()))
    return found


def rest(mode: str, users: Users, rounds: int) -> float:
    """||grad F||^2 where steps of all users on all samples end."""
    who = torch.arange(USERS)
    steps, batches, w = local(mode, USERS, batch=SAMPLES), whole(users, who), starting_point(1)
    for _ in range(rounds):
        w = steps.step(w.expand(USERS, *w.shape[1:]), batches, lr=1.0).mean(0, keepdim=True)
    return float((Meta.of(users, 1).mean(w) ** 2).sum())


def setting(eps: float) -> TrainingSetting:
    """Corollary 4.6: beta = O(eps), tau = O(eps^(-1/2))."""
    return TrainingSetting(
        alpha=ALPHA, beta=STEP * eps, tau=math.ceil(1 / math.sqrt(eps)),
        inner=BATCH, outer=BATCH, hessian=BATCH, delta=DELTA,
        fraction=ACTIVE / USERS, users=USERS,
    )  # fmt: skip


def rounds_of(eps: float) -> int:
    """Corollary 4.6: K = O(eps^(-3/2))."""
    return math.ceil(1 / (eps * math.sqrt(eps)))


def stationarity(mode: str, users: Users, eps: float, generator: torch.Generator) -> float:
    """The theorem's left side: the mean of ||grad F||^2 over rounds and steps, of which one is drawn in each round
    (Remark 4.7)."""
    of, meta, steps = setting(eps), Meta.of(users, RUNS), local(mode, RUNS * ACTIVE)
    w, total, rounds = starting_point(RUNS), 0.0, rounds_of(eps)
    for _ in range(rounds):
        who = torch.rand(RUNS, USERS, generator=generator).argsort(1)[:, :ACTIVE].flatten()
        looked_at = int(torch.randint(of.tau, (), generator=generator).item())
        lanes = w.repeat_interleave(ACTIVE, 0)
        for t in range(of.tau):
            if t == looked_at:
                total += float((meta.mean(apart(lanes, ACTIVE).mean(1)) ** 2).flatten(1).sum(1).mean())
            lanes = steps.step(lanes, drawn(users, who, generator), lr=of.beta)
        w = apart(lanes, ACTIVE).mean(1)
    return total / rounds


def theorem(mode: str, eps: float, gap: float) -> float:
    """Theorem 4.5's right side for ``mode``."""
    return theory.bound(LANDSCAPE, setting(eps), rounds=rounds_of(eps), gap=gap, by=ESTIMATORS[mode])


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
