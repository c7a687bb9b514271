"""FedBAT's Theorems 1 and 2 on a quadratic: how fast the variant falls that they cover, and whether it stays below them
(fedbat.md 6)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from edgefl.codecs.binarize import draw
from reproduce.entry import Arm, ArmRun, Chart, Claim, Column, Computed, Entry, Measurements, Scale
from reproduce.results import Judged, Results, judge_factory

CLIENTS, SAMPLED, DIMENSIONS, TAU = 8, 2, 10, 5
RUNS = 32
"""With noise of their own, whose mean stands for the expectation."""
CURVATURES = (1.0, 4.0)
"""mu and L."""
NOISE = 0.5
"""Deviation of each entry of a gradient."""
ROUNDS: Mapping[Scale, int] = {"smoke": 100, "cpu": 4_000, "paper": 20_000}
EXACT, BOTH, PART = "FedAvg", "FedBAT-inf", f"FedBAT-inf, {SAMPLED} of {CLIENTS} clients"
_SHARE, _SLOPE = "largest share of the bound", "slope"


@dataclass(frozen=True)
class SampledQuadratic:
    """F_k(w) = (w - c_k)^T A (w - c_k) / 2 with the diagonal A from mu to L; ``centres`` (clients, dimensions)."""

    centres: Tensor
    diagonal: Tensor = field(
        default_factory=lambda: torch.linspace(*CURVATURES, DIMENSIONS, dtype=torch.float64)
    )

    def gradients(self, w: Tensor) -> Tensor:
        """Exact, (..., clients, dimensions)."""
        return self.diagonal * (w - self.centres)

    def gap(self, w: Tensor) -> Tensor:
        """F(w) - F*, for w (..., dimensions)."""
        return (self.diagonal * (w - self.centres.mean(0)) ** 2).sum(-1) / 2

    @property
    def apart(self) -> float:
        """Gamma = F* - the mean of the F_k*, which are 0."""
        return float((self.diagonal * (self.centres.mean(0) - self.centres) ** 2).sum(1).mean()) / 2


@dataclass(frozen=True)
class Descent:
    """``t``: steps at each synchronisation, ``gaps``: mean of F - F* there; ``largest``: G^2, of any client and step."""

    t: list[int]
    gaps: list[float]
    largest: float


def gamma() -> float:
    """max(8 L / mu, tau) - 1."""
    return max(8 * CURVATURES[1] / CURVATURES[0], TAU) - 1


def bound(
    t: int, *, apart: float, q2: float, g2: float, sampled: int, start: float, clients: int = CLIENTS
) -> float:
    """Theorem 1's right-hand side after ``t`` steps, Theorem 2's where ``sampled`` is less than ``clients``; ``start`` is
    ||w_1 - w*||^2, all p_k are equal. The variance of a gradient is that of :data:`NOISE`."""
    mu, smooth = CURVATURES
    lost = (q2 * (clients - 1) + clients - sampled) / (sampled * (clients - 1))
    b = (
        NOISE**2 * DIMENSIONS / clients
        + 6 * smooth * apart
        + 8 * (1 + q2) * (TAU - 1) ** 2 * g2
        + 4 * lost * TAU**2 * g2
    )
    return smooth / mu / (gamma() + t) * (2 * b / mu + mu * (gamma() + 1) / 2 * start)


def descend(
    task: SampledQuadratic,
    rounds: int,
    generator: torch.Generator,
    *,
    binarized: bool,
    sampled: int = CLIENTS,
) -> Descent:
    """From 0, ``rounds`` times TAU steps of eta_t = 2 / (mu (gamma + t)): x = w + S(m) is where gradients are taken, and
    S(m) what is sent, with alpha = norm_inf(m) of each client (fedbat.md 6)."""
    shape = (RUNS, CLIENTS, DIMENSIONS)
    w, t, largest = torch.zeros(RUNS, 1, DIMENSIONS, dtype=torch.float64), 0, 0.0
    times, gaps = [0], [float(task.gap(w[:, 0]).mean())]

    def sent(m: Tensor) -> Tensor:
        if not binarized:
            return m
        alpha = m.abs().amax(-1, keepdim=True)
        return alpha * draw(m, alpha, torch.rand(shape, generator=generator, dtype=m.dtype))

    for _ in range(rounds):
        m = torch.zeros(shape, dtype=torch.float64)
        for _ in range(TAU):
            noise = NOISE * torch.randn(shape, generator=generator, dtype=torch.float64)
            gradient = task.gradients(w + sent(m)) + noise
            largest = max(largest, float((gradient**2).sum(-1).mean(0).max()))
            t += 1
            m = m - 2 / (CURVATURES[0] * (gamma() + t)) * gradient
        w = w + _mean(sent(m), sampled, generator)
        times.append(t)
        gaps.append(float(task.gap(w[:, 0]).mean()))
    return Descent(times, gaps, largest)


def _mean(sent: Tensor, sampled: int, generator: torch.Generator) -> Tensor:
    """(RUNS, 1, DIMENSIONS), over all clients, or ``sampled`` drawn without replacement in each run."""
    if sampled == CLIENTS:
        return sent.mean(1, keepdim=True)
    order = torch.rand(RUNS, CLIENTS, generator=generator).argsort(1)[:, :sampled]
    return torch.gather(sent, 1, order[:, :, None].expand(-1, -1, DIMENSIONS)).mean(1, keepdim=True)


def slope(times: Sequence[int], gaps: Sequence[float]) -> float:
    """Return the slope of log gap by log t, by least squares over the last nine tenths of the steps."""
    first, last = math.log(times[-1] / 10), math.log(times[-1])
    at = np.unique(np.searchsorted(times, np.exp(np.linspace(first, last, 40)) - 0.5))
    x, y = np.log(np.array(times)[at]), np.log(np.array(gaps)[at])
    return float(np.polyfit(x, y, 1)[0])


def _run(work: ArmRun, *, binarized: bool, sampled: int = CLIENTS) -> Measurements:
    generator = torch.Generator().manual_seed(work.seed)
    centres = 2 * torch.randn(CLIENTS, DIMENSIONS, generator=generator, dtype=torch.float64)
    task = SampledQuadratic(centres)
    found = descend(task, ROUNDS[work.scale], generator, binarized=binarized, sampled=sampled)
    q2 = DIMENSIONS - 1 if binarized else 0.0
    limits = [
        bound(
            t,
            apart=task.apart,
            q2=q2,
            g2=found.largest,
            sampled=sampled,
            start=float((centres.mean(0) ** 2).sum()),
        )
        for t in found.t
    ]
    shown = sorted({*np.unique(np.geomspace(1, len(found.t) - 1, 100).astype(int)).tolist()})
    return Measurements(
        {
            _SLOPE: slope(found.t, found.gaps),
            _SHARE: max(gap / limit for gap, limit in zip(found.gaps, limits, strict=True)),
            "F - F* at last": found.gaps[-1],
            "bound at last": limits[-1],
            "G^2": found.largest,
            "Gamma": task.apart,
        },
        {
            "gap": [(math.log10(found.t[at]), found.gaps[at]) for at in shown],
            "bound": [(math.log10(found.t[at]), limits[at]) for at in shown],
        },
    )


def arms(scale: Scale) -> Sequence[Arm]:
    """Return the arms without binarization, and with it for all clients and for some."""
    settings = {"rounds": ROUNDS[scale], "tau": TAU, "clients": CLIENTS, "dimensions": DIMENSIONS}
    return (
        Computed(EXACT, lambda work: _run(work, binarized=False), settings),
        Computed(BOTH, lambda work: _run(work, binarized=True), settings),
        Computed(
            PART, lambda work: _run(work, binarized=True, sampled=SAMPLED), {**settings, "sampled": SAMPLED}
        ),
    )


@judge_factory
def _below(results: Results, arm: str) -> Judged:
    most = float(results.of(arm, _SHARE).max())
    return Judged(most <= 1, f"at most {most:.2g} of the bound")


@judge_factory
def _order(results: Results, arm: str) -> Judged:
    """-1 to 0.2."""
    found = results.mean(arm, _SLOPE)
    return Judged(abs(found + 1) <= 0.2, f"T^{found:.2f}")


ENTRY = Entry(
    name="fedbat/theory",
    what="FedBAT, Theorems 1 and 2: the order of convergence and the bounds, on a quadratic",
    arms=arms,
    columns=(
        Column(_SLOPE, "slope", digits=2),
        Column("F - F* at last", "F - F* at last", digits=6),
        Column("bound at last", "bound at last", digits=2),
        Column(_SHARE, _SHARE, digits=6),
        Column("G^2", "G^2", digits=1),
        Column("Gamma", "Gamma", digits=2),
    ),
    claims=(
        Claim(
            "H11", "Theorem 1's bound holds at every synchronisation", "Theorem 1", _below(BOTH), exact=True
        ),
        Claim(
            "H11", "Theorem 2's bound holds at every synchronisation", "Theorem 2", _below(PART), exact=True
        ),
        Claim("H11", "with all clients F - F* falls as 1/T (-1 +- 0.2)", "O(1/T)", _order(BOTH)),
        Claim("H11", "with some of the clients F - F* falls as 1/T (-1 +- 0.2)", "O(1/T)", _order(PART)),
        Claim(
            "H11", "FedAvg, of which the theory makes no other order, falls so too", "O(1/T)", _order(EXACT)
        ),
    ),
    charts=(
        Chart("gap.svg", "F - F* on a quadratic", "gap", x="log10 of steps", y="F - F*", log_y=True),
        Chart("bound.svg", "The theorems' bounds for it", "bound", x="log10 of steps", y="bound", log_y=True),
    ),
    note=(
        f"F_k(w) = (w - c_k)^T A (w - c_k) / 2, A diagonal from {CURVATURES[0]:g} to {CURVATURES[1]:g}, {DIMENSIONS} "
        f"dimensions, {CLIENTS} clients, c_k normal with deviation 2, gradients with normal noise of deviation {NOISE} in "
        f"each entry, tau = {TAU}, w = 0 at first, eta_t = 2 / (mu (gamma + t)); means of {RUNS} runs. FedBAT-inf is what "
        "the theorems cover, not the practical algorithm: phi = 0, alpha = norm_inf(m) in each step (fedbat.md 8.11). "
        "q^2 = d - 1, G^2: the largest mean square of a client's gradient that was met. Slope: over the last nine tenths "
        "of the steps."
    ),
)
