"""Per-FedAvg's lemmas and theorem on users of logistic regression, whose constants are known (per_fedavg.md 6.1 to 6.5).

Ten users of logistic regression (two features, 32 samples), on which all constants are known; edgefl's algorithm
`per_fedavg` in float64, alpha = 1, D = D' = D'' = 8. Exponents count as equal within 0.1; the last must be at least 0.9. The
bounds themselves are met by orders of magnitude, so that they are not listed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.contract.tensors import TensorSpec
from edgefl.models.losses.classification import CROSS_ENTROPY
from edgefl.objective.objective import Objective
from reproduce.batched_clients import together
from reproduce.entry import ArmRun, Chart, Check, Computed, Entry, Measurements, Results, Scale, note_of

USERS, SAMPLES, FEATURES, ALPHA, BATCH, ACTIVE = 10, 32, 2, 1.0, 8, 5
EXACT, HF, FO = "exact", "hf", "fo"
MODES = (EXACT, HF, FO)
NAME = "linear.weight"
REPEATS = {"drift": 64, "gradient": 8}
"""Repetitions whose mean stands for the expectation."""
ACCURACIES: dict[Scale, tuple[float, ...]] = {
    "smoke": (0.04, 0.02),
    "cpu": (0.04, 0.02, 0.01, 0.005),
    "paper": (0.04, 0.02, 0.01, 0.005, 0.0025),
}
STEPS_TO_REST: dict[Scale, int] = {"smoke": 200, "cpu": 10_000, "paper": 10_000}


@dataclass(frozen=True)
class Users:
    """Samples ``x`` of norm 1, float64 (users, samples, features), and labels ``y``, int64 (users, samples)."""

    x: Tensor
    y: Tensor

    @classmethod
    def drawn(cls, generator: torch.Generator) -> Users:
        """Draw users with centres and separating directions of their own, partly shared, and a tenth of wrong labels."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        x = normal(USERS, SAMPLES, FEATURES) + normal(USERS, 1, FEATURES)
        direction = normal(USERS, FEATURES, 1) + normal(FEATURES, 1)
        wrong = torch.rand(USERS, SAMPLES, generator=generator) < 0.1
        return cls(x / x.norm(dim=-1, keepdim=True), (((x @ direction).squeeze(-1) > 0) ^ wrong).long())

    def batches(self, who: Tensor, rows: list[Tensor]) -> dict[str, Tensor]:
        """Return a batch for each of ``rows`` (clients, size), of clients that are the users ``who`` (clients,)."""
        at = who[:, None]
        chosen = ((stream, own) for stream, own in enumerate(rows))
        return {f"batch.{k}.{n}": v[at, own] for k, own in chosen for n, v in (("x", self.x), ("y", self.y))}

    def whole(self, who: Tensor) -> dict[str, Tensor]:
        """Return three batches of all samples."""
        return self.batches(who, [torch.arange(SAMPLES).expand(len(who), SAMPLES)] * 3)

    def drawn_batches(self, who: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw three independent batches with replacement."""
        rows = [torch.randint(SAMPLES, (len(who), BATCH), generator=generator) for _ in range(3)]
        return self.batches(who, rows)


class LocalSteps:
    """Steps of edgefl's algorithm ``per_fedavg`` for many clients at once, in float64."""

    def __init__(self, mode: str, clients: int, batch: int = BATCH) -> None:
        module = nn.Sequential(OrderedDict(linear=nn.Linear(FEATURES, 2, bias=False)))
        options: dict[str, Any] = {"delta": 1e-3} if mode == HF else {}
        objective = Objective(module, TensorSpec((FEATURES,)), CROSS_ENTROPY)
        one = per_fedavg(objective, mode=mode, alpha=ALPHA, batch=batch, **options)
        self._algorithm = together(one, clients)

    def step(self, w: Tensor, batches: dict[str, Tensor], **hyper: float) -> Tensor:
        """Return ``w`` (clients, 2, features) after a step; ``hyper`` replaces the algorithm's scalars."""
        hyper = {**self._algorithm.hyper, **hyper}
        scalars = {f"hyper.{name}": torch.tensor(value, dtype=torch.float64) for name, value in hyper.items()}
        stepped = self._algorithm.phases[0].function({f"state.weights.{NAME}": w, **batches, **scalars})
        return stepped[f"state.weights.{NAME}"]

    def direction(self, w: Tensor, batches: dict[str, Tensor], **hyper: float) -> Tensor:
        """Return the direction G of a step."""
        return w - self.step(w, batches, lr=1.0, **hyper)


def each_user(mode: str, users: Users, w: Tensor, **hyper: float) -> Tensor:
    """Return G of every user on all samples at one ``w`` (2, features): (users, 2, features)."""
    who = torch.arange(USERS)
    return LocalSteps(mode, USERS, SAMPLES).direction(w.expand(USERS, *w.shape), users.whole(who), **hyper)


def slope(points: list[tuple[float, float]]) -> float:
    """Return the least-squares exponent of y in x."""
    x, y = np.log(np.array(points, np.float64)).T
    return float(np.polyfit(x, y, 1)[0])


def rest(mode: str, users: Users, steps: int) -> float:
    """Return ||grad F||^2 where steps of all users on all samples end."""
    who, w = torch.arange(USERS), torch.zeros(2, FEATURES, dtype=torch.float64)
    local, batches = LocalSteps(mode, USERS, SAMPLES), users.whole(who)
    for _ in range(steps):
        w = local.step(w.expand(USERS, *w.shape), batches, lr=1.0).mean(0)
    return float((each_user(EXACT, users, w).mean(0) ** 2).sum())


def drift(mode: str, users: Users, beta: float, generator: torch.Generator) -> float:
    """Return the clients' mean squared distance from their mean after 16 local steps from one model."""
    who = torch.arange(USERS).repeat(REPEATS["drift"])
    local, w = LocalSteps(mode, len(who)), torch.zeros(len(who), 2, FEATURES, dtype=torch.float64)
    for _ in range(16):
        w = local.step(w, users.drawn_batches(who, generator), lr=beta)
    apart = w.reshape(-1, USERS, 2 * FEATURES)
    return float(((apart - apart.mean(1, keepdim=True)) ** 2).sum(-1).mean())


def stationarity(mode: str, users: Users, eps: float, generator: torch.Generator) -> float:
    """Return the mean of ||grad F||^2 over rounds, at a step drawn in each (Remark 4.7), with Corollary 4.6's beta = O(eps),
    tau = O(eps^(-1/2)) and K = O(eps^(-3/2))."""
    runs, tau, rounds = REPEATS["gradient"], math.ceil(eps**-0.5), math.ceil(eps**-1.5)
    local, meta = LocalSteps(mode, runs * ACTIVE), LocalSteps(EXACT, runs * USERS, SAMPLES)
    everyone = users.whole(torch.arange(USERS).repeat(runs))
    w = torch.zeros(runs, 2, FEATURES, dtype=torch.float64)
    total: float = 0.0
    for _ in range(rounds):
        who = torch.rand(runs, USERS, generator=generator).argsort(1)[:, :ACTIVE].flatten()
        looked_at = int(torch.randint(tau, (), generator=generator))
        lanes = w.repeat_interleave(ACTIVE, 0)
        for t in range(tau):
            if t == looked_at:
                mean = lanes.unflatten(0, (runs, ACTIVE)).mean(1)
                gradients = meta.direction(mean.repeat_interleave(USERS, 0), everyone)
                total += float((gradients.unflatten(0, (runs, USERS)).mean(1) ** 2).flatten(1).sum(1).mean())
            lanes = local.step(lanes, users.drawn_batches(who, generator), lr=0.2 * eps)
        w = lanes.unflatten(0, (runs, ACTIVE)).mean(1)
    return float(total / rounds)


def _run(work: ArmRun, mode: str) -> Measurements:
    generator = torch.Generator().manual_seed(work.seed)
    users = Users.drawn(generator)
    w = 2 * torch.randn(2, FEATURES, generator=generator, dtype=torch.float64)
    exact = each_user(EXACT, users, w)
    betas, deltas = (0.002, 0.001, 0.0005, 0.00025), [2.0**-power for power in range(6)]
    lines = {"drift": [(beta, drift(mode, users, beta, generator)) for beta in betas]}
    if mode == HF:
        lines["error"] = [(d, float((each_user(HF, users, w, delta=d) - exact).norm())) for d in deltas]
    lines["gradient"] = []
    for eps in ACCURACIES[work.scale]:
        lines["gradient"].append((1 / eps, stationarity(mode, users, eps, generator)))
        work.progress(f"eps = {eps:g}")
    figures = {
        "bias": float((each_user(mode, users, w) - exact).flatten(1).norm(dim=1).mean()),
        "at rest": rest(mode, users, STEPS_TO_REST[work.scale]),
    }
    if work.scale != "smoke":  # too few rounds there to leave the transient
        figures["fall"] = -slope(lines["gradient"][-2:])
    return Measurements(figures | {f"{name} slope": slope(line) for name, line in lines.items()}, lines)


def _slopes(text: str, figure: str, low: float, high: float, modes: tuple[str, ...] = MODES) -> Check:
    """Return the check that a figure of each mode is between two bounds."""

    def test(results: Results) -> tuple[bool, str]:
        found = {mode: results.of(mode, figure) for mode in modes}
        within = all(((low <= values) & (values <= high)).all() for values in found.values())
        return within, ", ".join(f"{mode} {values.mean():.2f}" for mode, values in found.items())

    return Check(text, test)


def _only_fo(text: str, figure: str) -> Check:
    """Return the check that a figure is near 0 but for FO."""

    def test(results: Results) -> tuple[bool, str]:
        seeds = results.common_seeds(*MODES)
        fo, hf, exact = (results.of(mode, figure, seeds) for mode in (FO, HF, EXACT))
        found = f"{fo.min():.0e}, HF {hf.max():.0e}, exact {exact.max():.0e}"
        return bool((fo > 1000 * np.maximum(hf, exact)).all()), found

    return Check(text, test)


def _arms(scale: Scale) -> list[Computed]:
    settings = {"accuracies": list(ACCURACIES[scale]), "steps to rest": STEPS_TO_REST[scale], **REPEATS}
    return [Computed(mode, partial(_run, mode=mode), settings) for mode in MODES]


THEORY = Entry(
    "per_fedavg/theory", "Lemma 4.3 to Theorem 4.5: bias, drift and stationarity", _arms,
    checks=[
        _slopes("HF's error is O(delta^2)", "error slope", 1.9, 2.1, (HF,)),
        _only_fo("all samples leave only FO a bias", "bias"),
        _only_fo("only FO rests where grad F is not 0", "at rest"),
        _slopes("drift grows with beta^2", "drift slope", 1.9, 2.1),
        _slopes("mean ||grad F||^2 falls with eps", "fall", 0.9, math.inf),
    ],
    charts=[
        Chart("gradient.svg", "Mean of ||grad F||^2", "gradient", x="1 / eps", log_y=True),
        Chart("delta.svg", "HF: error of the difference quotient", "error", x="delta", log_y=True, arms=(HF,)),
    ],
    note=note_of(__doc__),
)  # fmt: skip
