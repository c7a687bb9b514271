"""EmbracingFL invariant 19: what strong clients alone train ends where *their* gradient vanishes, not everybody's."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

import numpy as np
import pytest

from edgefl.wire.tensors import Arrays
from edgefl_server.aggregate.aggregator import Aggregator, layout_of

CLIENTS, STEP, ROUNDS = 4, 0.5, 50
ALL = range(CLIENTS)
# f_i(y, z) = ((y - A_i)^2 + (z + y / 2 - B_i)^2) / 2; y is the input side, which only strong clients train.
A, B = np.array([-1.0, 0.5, 2.0, 4.0]), np.array([1.0, -2.0, 0.0, 3.0])


def gradient(client: int, y: float, z: float) -> tuple[float, float]:
    """Of f_i: (by y, by z)."""
    residual = z + y / 2 - B[client]
    return (y - A[client]) + residual / 2, residual


def mean_gradient(weights: Arrays) -> tuple[float, float]:
    """Of the mean of all f_i."""
    y, z = (float(weights[name][0]) for name in ("y", "z"))
    by_client = np.array([gradient(client, y, z) for client in ALL])
    return float(by_client[:, 0].mean()), float(by_client[:, 1].mean())


def limit(strong: Collection[int], rounds: int = ROUNDS) -> Arrays:
    """Where rounds of one step each lead, averaged by the server."""
    weights: Arrays = {"y": np.zeros(1, np.float32), "z": np.zeros(1, np.float32)}
    for _ in range(rounds):
        aggregator = Aggregator(layout_of(weights), weight_limit=CLIENTS, device="cpu")
        for client in ALL:
            slopes = gradient(client, float(weights["y"][0]), float(weights["z"][0]))
            moved = {
                name: weights[name] - np.float32(STEP * slope)
                for name, slope in zip(("y", "z"), slopes, strict=True)
                if name == "z" or client in strong
            }
            aggregator.add(aggregator.check(moved, dict.fromkeys(moved)), weight=1)
        weights = aggregator.result(weights)
    return weights


def test_i19_only_the_gradient_of_what_few_train_stays() -> None:
    weights = limit({0, 1})

    of_y, of_z = mean_gradient(weights)
    assert abs(of_y) > 0.5 and abs(of_z) < 1e-5
    y, z = float(weights["y"][0]), float(weights["z"][0])
    assert np.mean([gradient(client, y, z)[0] for client in (0, 1)]) == pytest.approx(0.0, abs=1e-5)


def test_i19_with_strong_clients_only_it_vanishes() -> None:
    assert mean_gradient(limit(ALL)) == pytest.approx((0.0, 0.0), abs=1e-5)


@pytest.mark.parametrize("strong", [1, 2, 3])
def test_i19_over_all_sets_the_mean_stays_below_the_bound(strong: int) -> None:
    squares, bounds = [], []
    for chosen in combinations(ALL, strong):
        weights = limit(chosen, rounds=20)
        y, z = float(weights["y"][0]), float(weights["z"][0])
        own = np.array([gradient(client, y, z)[0] for client in ALL])
        squares.append(own.mean() ** 2)
        bounds.append(14 / (3 * strong) * np.square(own - own.mean()).mean())

    assert 0 < np.mean(squares) < np.mean(bounds)
