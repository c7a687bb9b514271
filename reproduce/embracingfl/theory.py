"""EmbracingFL's Theorem 1: its right-hand side, and a quadratic on which it is put to the test (embracingfl.md 6)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from edgefl.analysis.charts import line_chart
from edgefl.errors import ConfigError
from edgefl.wire.tensors import Array
from reproduce.entry import ArmRun, Claim, Computed, Entry, Measurements, Scale
from reproduce.results import Judged, Results

CLIENTS, TAU = 8, 5
ROUNDS: Mapping[Scale, int] = {"smoke": 200, "cpu": 4000, "paper": 4000}
ARM = "quadratic"


@dataclass(frozen=True)
class BlockConstants:
    """Of the prefix y or the suffix z: smoothness L, variance sigma^2 of a gradient's noise, and sbar^2 of the clients."""

    smoothness: float
    noise: float
    apart: float


def largest_step(y: BlockConstants, z: BlockConstants, tau: int) -> float:
    """min(1 / (tau L_max), 1 / (4 L_max sqrt(tau (tau - 1)))); the second from tau = 2 on."""
    most = max(y.smoothness, z.smoothness)
    second = 1 / (4 * most * math.sqrt(tau * (tau - 1))) if tau > 1 else math.inf
    return min(1 / (tau * most), second)


def bound(
    y: BlockConstants,
    z: BlockConstants,
    *,
    strong: int,
    clients: int,
    tau: int,
    lr: float,
    rounds: int,
    gap: float,
) -> float:
    """Theorem 1's bound on the mean of E ||grad F||^2 over ``rounds``; ``gap`` is F(x_0) - F(x_*).

    ConfigError for a step size that the theorem does not allow.
    """
    if not 0 < lr <= largest_step(y, z, tau) * (1 + 1e-12):
        raise ConfigError(
            f"the theorem allows step sizes up to {largest_step(y, z, tau):.4g} here, found {lr:.4g}: take a smaller one",
            lr=lr,
        )
    drift_y, drift_z = (16 / 3 * (part.smoothness * lr) ** 2 * (tau - 1) for part in (y, z))
    return (
        14 * gap / (3 * rounds * lr * tau)
        + (7 * y.smoothness * lr / (3 * strong) + drift_y) * y.noise
        + (14 / (3 * strong) + 4 * drift_y * tau) * y.apart
        + (7 * z.smoothness * lr / (3 * clients) + drift_z / 2) * z.noise
        + 2 * drift_z * tau * z.apart
    )


@dataclass(frozen=True)
class Quadratic:
    """f_i(y, z) = ((y - a_i)^2 + (z + y/2 - b_i)^2) / 2 of numbers y (prefix) and z (suffix); gradients are exact."""

    a: Array
    b: Array

    def gradients(self, y: Array, z: Array) -> tuple[Array, Array]:
        """By y and by z of every client, for y and z of shape (..., clients)."""
        residual = z + y / 2 - self.b
        return (y - self.a) + residual / 2, residual

    def value(self, y: float, z: float) -> float:
        """F."""
        return float(np.mean((y - self.a) ** 2 + (z + y / 2 - self.b) ** 2) / 2)

    @property
    def parts(self) -> tuple[BlockConstants, BlockConstants]:
        """Clients differ by a constant in their gradients, hence ``apart`` is exact. L: norms of the Hessian's rows."""
        apart = np.var(self.a + self.b / 2), np.var(self.b)
        rows = math.hypot(1.25, 0.5), math.hypot(0.5, 1.0)
        first, second = (BlockConstants(row, 0.0, float(each)) for row, each in zip(rows, apart, strict=True))
        return first, second

    @property
    def least(self) -> float:
        """F at its minimum, y = mean a, z = mean b - y/2."""
        y = float(self.a.mean())
        return self.value(y, float(self.b.mean()) - y / 2)


def squares(task: Quadratic, strong: int, rounds: int, lr: float) -> Array:
    """||grad F||^2 before each round, mean over every set of ``strong`` clients: float64 (rounds + 1,)."""
    clients = len(task.a)
    chosen = np.array(list(combinations(range(clients), strong)))
    trains = np.zeros((len(chosen), clients))
    np.put_along_axis(trains, chosen, 1.0, axis=1)
    y, z = np.zeros((len(chosen), 1)), np.zeros((len(chosen), 1))
    found = []
    for _ in range(rounds):
        found.append(_square(task, y, z))
        own_y, own_z = np.repeat(y, clients, 1), np.repeat(z, clients, 1)
        for _ in range(TAU):
            slope_y, slope_z = task.gradients(own_y, own_z)
            own_y, own_z = own_y - lr * slope_y * trains, own_z - lr * slope_z
        y = (own_y * trains).sum(1, keepdims=True) / strong
        z = own_z.mean(1, keepdims=True)
    return np.array([*found, _square(task, y, z)])


def _square(task: Quadratic, y: Array, z: Array) -> float:
    """Mean over the sets of strong clients."""
    slopes = (
        each.mean(axis=1)
        for each in task.gradients(np.repeat(y, len(task.a), 1), np.repeat(z, len(task.a), 1))
    )
    return float(sum(np.mean(slope**2) for slope in slopes))


def run(work: ArmRun) -> Measurements:
    """For 1, 2, 4 and all 8 strong clients, with the largest step that the theorem allows, and a hundredth of it."""
    rng = np.random.default_rng(work.seed)
    task = Quadratic(rng.normal(0, 2, CLIENTS), rng.normal(0, 2, CLIENTS))
    y, z = task.parts
    rounds, gap, most = ROUNDS[work.scale], task.value(0, 0) - task.least, largest_step(*task.parts, TAU)
    figures: dict[str, float] = {"sbar_y^2": y.apart}
    lines: dict[str, list[tuple[float, float]]] = {}
    for strong in (1, 2, 4, CLIENTS):
        work.progress(f"{strong} strong clients")
        name = _name(strong)
        path = squares(task, strong, rounds, most)
        limit = bound(y, z, strong=strong, clients=CLIENTS, tau=TAU, lr=most, rounds=rounds, gap=gap)
        small = squares(task, strong, 5 * rounds, most / 100)
        figures |= {
            f"{name}: mean": float(path[:-1].mean()),
            f"{name}: bound": limit,
            f"{name}: floor": float(small[-1]),
            f"{name}: floor expected": y.apart / strong * (CLIENTS - strong) / (CLIENTS - 1),
        }
        shown = max(1, len(small) // 200)
        lines[name] = [(float(t), float(small[t])) for t in range(0, len(small), shown)]
    picture = line_chart(
        lines,
        title="Squared gradient on a quadratic, by strong clients",
        x="round",
        y="||grad F||^2",
        log_y=True,
    )
    return Measurements(figures, lines, {"floor.svg": picture})


def _name(strong: int) -> str:
    return f"{strong} of {CLIENTS} strong"


def _below(results: Results) -> Judged:
    shares = [
        results.of(ARM, f"{_name(strong)}: mean") / results.of(ARM, f"{_name(strong)}: bound")
        for strong in (1, 2, 4, CLIENTS)
    ]
    most = float(np.max(shares))
    return Judged(most <= 1, f"at most {most:.2g} of the bound")


def _floor(results: Results) -> Judged:
    """To 2 percent of what sets drawn without replacement give."""
    off = [
        np.abs(
            results.of(ARM, f"{_name(s)}: floor") / results.of(ARM, f"{_name(s)}: floor expected") - 1
        ).max()
        for s in (1, 2, 4)
    ]
    floors = ", ".join(f"{results.mean(ARM, f'{_name(s)}: floor'):.3g}" for s in (1, 2, 4))
    return Judged(bool(np.max(off) < 0.02), f"{floors}; off by at most {np.max(off):.2%}")


def _vanishes(results: Results) -> Judged:
    """Next to the clients' spread."""
    found = float(np.max(results.of(ARM, f"{_name(CLIENTS)}: floor") / results.of(ARM, "sbar_y^2")))
    return Judged(found < 1e-3, f"{found:.1g} of sbar_y^2")


ENTRY = Entry(
    name="embracingfl/theory",
    what="EmbracingFL, Theorem 1: the bound holds on a quadratic, and its floor falls with the number of strong clients",
    arms=lambda scale: (Computed(ARM, run, {"rounds": ROUNDS[scale], "clients": CLIENTS, "tau": TAU}),),
    columns=(),
    claims=(
        Claim("H9", "the mean of ||grad F||^2 is below the bound", "Theorem 1", _below, exact=True),
        Claim(
            "H9",
            "with small steps ||grad F||^2 ends at sbar_y^2 / s, times (m - s)/(m - 1) for sets without replacement",
            "O(1/s)",
            _floor,
        ),
        Claim("H9", "with strong clients only it vanishes", "FedAvg's rate", _vanishes),
    ),
    note=(
        "f_i(y, z) = ((y - a_i)^2 + (z + y/2 - b_i)^2) / 2, a and b normal with deviation 2, 8 clients, tau = 5, "
        "exact gradients; means over all sets of strong clients. Bound: at the largest step size that the theorem "
        "allows; floor: a hundredth of it."
    ),
)
