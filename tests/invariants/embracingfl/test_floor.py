"""EmbracingFL invariant 19: what strong clients alone train ends where *their* gradient vanishes, not everybody's."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from edgefl.contract.tensors import Tensors
from edgefl.wire.tensors import Arrays
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from reproduce.embracingfl import theory
from reproduce.embracingfl.measures import averaged, similarities, synchronised
from tests.invariants.embracingfl.tiny import samples, svcca, tiny
from tests.support.errors import ConfigError, refuses

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


# -- EmbracingFL invariant 18: the right-hand side of Theorem 1 --------------------------------------------


def _bound(
    strong: int, *, lr: float = 0.01, rounds: int = 100, apart: float = 1.0, noise: float = 1.0
) -> float:
    y, z = theory.BlockConstants(2.0, noise, apart), theory.BlockConstants(1.0, 1.0, 1.0)
    return theory.bound(y, z, strong=strong, clients=8, tau=5, lr=lr, rounds=rounds, gap=1.0)


def test_i18_the_bound_falls_with_strong_clients_and_rounds_to_its_floor() -> None:
    assert _bound(1) > _bound(2) > _bound(8) and _bound(2) > _bound(2, rounds=1000)
    assert _bound(1, apart=0.0, noise=0.0) == _bound(8, apart=0.0, noise=0.0)
    assert _bound(2, lr=1e-6, rounds=10**12) == pytest.approx(14 / 6, rel=1e-3)
    with refuses(ConfigError, lr=1.0):
        _bound(2, lr=1.0)


# -- EmbracingFL I15 and I16: how alike two models' layers are, and what synchronising a part of them does --


def noise(channels: int, columns: int, seed: int) -> Tensor:
    return torch.randn(channels, columns, generator=torch.Generator().manual_seed(seed))


def rotation(channels: int, seed: int) -> Tensor:
    return torch.linalg.qr(noise(channels, channels, seed).double()).Q


@given(channels=st.integers(1, 9), columns=st.integers(12, 40), seed=st.integers(0, 10_000))
def test_i15_identical_inputs_give_one(channels: int, columns: int, seed: int) -> None:
    rows = noise(channels, columns, seed)
    assert svcca(rows, rows) == pytest.approx(1.0, abs=1e-9)


@given(channels=st.integers(5, 9), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 10_000))
def test_i15_invariant_to_rotation_and_positive_scale(channels: int, scale: float, seed: int) -> None:
    # Directions of clearly different strength: which are the strongest does not hang on rounding.
    strength = 2.0 ** -torch.arange(channels).double()
    a = strength[:, None] * noise(channels, 40, seed).double()
    b = a + 0.3 * strength[:, None] * noise(channels, 40, seed + 1).double()
    turned = scale * (rotation(channels, seed) @ b) + noise(channels, 1, seed + 2).double()
    assert svcca(a, turned) == pytest.approx(svcca(a, b), abs=1e-6)


@given(
    channels=st.lists(st.integers(1, 8), min_size=2, max_size=2),
    seed=st.integers(0, 10_000),
    keep=st.integers(1, 6),
)
def test_i15_lies_in_the_unit_interval_and_is_symmetric(channels: list[int], seed: int, keep: int) -> None:
    a, b = (noise(size, 20, seed + position) for position, size in enumerate(channels))
    found = svcca(a, b, keep)
    assert 0.0 <= found <= 1.0
    assert svcca(b, a, keep) == pytest.approx(found, abs=1e-9)


def test_i15_independent_noise_comes_near_zero_as_samples_grow() -> None:
    found = [svcca(noise(8, columns, 1), noise(8, columns, 2)) for columns in (30, 300, 3_000, 30_000)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.2 and found[-1] < 0.02


def test_i15_is_the_mean_of_the_canonical_correlations() -> None:
    # Two orthonormal centred directions per side, one shared and one at 60 degrees; a third is weak and left out.
    basis = torch.linalg.qr(noise(6, 6, 3).double() - noise(6, 6, 3).double().mean(dim=0)).Q
    basis = torch.linalg.qr(torch.cat((torch.ones(6, 1).double(), basis), dim=1)).Q[:, 1:5].T
    a = torch.stack((5 * basis[0], 3 * basis[1], 0.1 * basis[3]))
    turned = math.cos(math.pi / 3) * basis[1] + math.sin(math.pi / 3) * basis[2]
    b = torch.stack((2 * basis[0], 4 * turned, 0.1 * basis[3]))
    assert svcca(a, b, keep=2) == pytest.approx(0.75, abs=1e-9)
    assert svcca(a, b, keep=3) == pytest.approx(2.5 / 3, abs=1e-9)


def test_i16_first_half_sync_equals_synchronised_layers_only() -> None:
    spec = tiny("resnet8")
    held_out, _ = samples(spec, 16, 7)
    models = [_apart(dict(spec.weights), seed) for seed in range(3)]

    before = similarities(spec, models, held_out, spec.units)
    after = similarities(spec, averaged(models, synchronised(spec, "first_half")), held_out, spec.units)

    assert spec.units == ("stem", "block1", "block2", "block3", "head")  # the half is cut behind block 1
    for unit in ("stem", "block1"):
        assert max(before[unit]) < 1.0 - 1e-4
        assert after[unit] == pytest.approx([1.0] * 3, abs=1e-9)
    for unit in ("block2", "block3", "head"):
        assert max(after[unit]) < 1.0 - 1e-4


def _apart(weights: Tensors, seed: int) -> Tensors:
    """A client's own model: moving statistics have moved as well."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor * (1 + 0.5 * torch.rand(tensor.shape, generator=generator))
        + 0.1 * torch.rand(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }
