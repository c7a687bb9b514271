"""EmbracingFL's Theorem 1: its right-hand side, and a quadratic on which it is put to the test (embracingfl.md 6).

f_i(y, z) = ((y - a_i)^2 + (z + y/2 - b_i)^2) / 2, a and b normal with deviation 2, 8 clients. tau = 5, exact gradients, a
fiftieth of the largest step that the theorem allows; means over all sets of s strong clients of m = 8. Sets are drawn
without replacement, hence the factor (m - s) / (m - 1) in Lemma 3's sbar_y^2 / s: with strong clients only the floor is 0.
Numbers of checks: s = 1, 2, 4, 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from edgefl.errors import ConfigError
from edgefl.wire.tensors import Array
from reproduce.entry import ArmRun, Chart, Check, Computed, Entry, Measurements, bounded, note_of

CLIENTS, TAU, STRONG, ROUNDS = 8, 5, (1, 2, 4, 8), 10_000


@dataclass(frozen=True)
class BlockConstants:
    """Constants of the prefix y or the suffix z: smoothness L, variance sigma^2 of the noise, and sbar^2 of the clients."""

    smoothness: float
    noise: float
    apart: float


def largest_step(y: BlockConstants, z: BlockConstants, tau: int) -> float:
    """Return min(1 / (tau L_max), 1 / (4 L_max sqrt(tau (tau - 1)))); the second from tau = 2 on."""
    return 1 / max(y.smoothness, z.smoothness) / max(tau, 4 * math.sqrt(tau * (tau - 1)))


def bound(
    y: BlockConstants, z: BlockConstants, *, strong: int, clients: int, tau: int, lr: float, rounds: int, gap: float
) -> float:  # fmt: skip
    """Return Theorem 1's bound on the mean of E ||grad F||^2 over ``rounds``; ``gap`` is F(x_0) - F(x_*).

    Raises:
        ConfigError: the theorem does not allow the step size.
    """
    most = largest_step(y, z, tau)
    if not 0 < lr <= most * (1 + 1e-12):
        raise ConfigError(f"expected a step size up to {most:.4g}, found {lr:.4g}; take a smaller one", lr=lr)
    drift_y, drift_z = (16 / 3 * (part.smoothness * lr) ** 2 * (tau - 1) for part in (y, z))
    return (
        14 * gap / (3 * rounds * lr * tau)
        + (7 * y.smoothness * lr / (3 * strong) + drift_y) * y.noise
        + (14 / (3 * strong) + 4 * drift_y * tau) * y.apart
        + (7 * z.smoothness * lr / (3 * clients) + drift_z / 2) * z.noise
        + 2 * drift_z * tau * z.apart
    )


def gradients(a: Array, b: Array, y: Array, z: Array) -> tuple[Array, Array]:
    """Return every client's gradient by y and by z, for y and z of shape (..., clients) or (..., 1)."""
    residual = z + y / 2 - b
    return (y - a) + residual / 2, residual


def squares(a: Array, b: Array, strong: int, rounds: int, lr: float) -> Array:
    """Return ||grad F||^2 before each round and at the end, float64 (rounds + 1,), mean over all sets of strong clients."""
    chosen = np.array(list(combinations(range(len(a)), strong)))
    trains, found = np.zeros((len(chosen), len(a))), []
    np.put_along_axis(trains, chosen, 1.0, axis=1)
    y = z = np.zeros((len(chosen), 1))
    for _ in range(rounds + 1):
        found.append(sum(np.mean(each.mean(axis=1) ** 2) for each in gradients(a, b, y, z)))
        own_y, own_z = y, z
        for _ in range(TAU):
            slope_y, slope_z = gradients(a, b, own_y, own_z)
            own_y, own_z = own_y - lr * slope_y * trains, own_z - lr * slope_z
        y, z = (own_y * trains).sum(1, keepdims=True) / strong, own_z.mean(1, keepdims=True)
    return np.array(found)


def run(work: ArmRun) -> Measurements:
    """Return the mean of ||grad F||^2 as a share of the bound, and its end's distance from the floor, by strong clients."""
    a, b = np.random.default_rng(work.seed).normal(0, 2, (2, CLIENTS))
    # Clients differ by a constant in their gradients. L: norms of the rows of the Hessian.
    y = BlockConstants(math.hypot(1.25, 0.5), 0.0, float(np.var(a + b / 2)))
    z = BlockConstants(math.hypot(0.5, 1.0), 0.0, float(np.var(b)))
    lr, gap = largest_step(y, z, TAU) / 50, float(a.mean() ** 2 + b.mean() ** 2) / 2
    figures, lines = {}, {}
    for strong in STRONG:
        path = squares(a, b, strong, ROUNDS, lr)
        limit = bound(y, z, strong=strong, clients=CLIENTS, tau=TAU, lr=lr, rounds=ROUNDS, gap=gap)
        floor = y.apart / strong * (CLIENTS - strong) / (CLIENTS - 1)
        figures[f"{strong}: share"] = float(path[:-1].mean()) / limit
        figures[f"{strong}: off"] = abs(float(path[-1]) - floor) / y.apart
        lines[f"{strong} strong"] = [(float(at), float(each)) for at, each in enumerate(path)]
    return Measurements(figures, lines)


def _bounded(text: str, figure: str, most: float) -> Check:
    return bounded(text, most, *(("quadratic", f"{strong}: {figure}") for strong in STRONG))


ENTRY = Entry(
    "embracingfl/theorem1", "Theorem 1: more strong clients, a lower floor", lambda _: [Computed("quadratic", run)],
    checks=[
        _bounded("mean ||grad F||^2 / bound <= 1", "share", 1),
        _bounded("|end - floor| <= 0.005 sbar_y^2", "off", 0.005),
    ],
    charts=[Chart(f"{s}.svg", f"||grad F||^2, {s} of 8 strong", f"{s} strong", log_y=True) for s in STRONG],
    note=note_of(__doc__),
)  # fmt: skip
