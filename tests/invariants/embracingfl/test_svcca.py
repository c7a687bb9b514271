"""EmbracingFL I15 and I16: how alike two models' layers are, and what synchronising a part of them does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from edgefl.contract.tensors import Tensors
from reproduce.embracingfl.partial_synchronization import averaged, similarities, svcca, synchronised
from tests.invariants.embracingfl.tiny import samples, tiny


def noise(channels: int, columns: int, seed: int) -> Tensor:
    return torch.randn(channels, columns, generator=torch.Generator().manual_seed(seed))


def rotation(channels: int, seed: int) -> Tensor:
    return torch.linalg.qr(noise(channels, channels, seed).double()).Q


@given(channels=st.integers(1, 9), columns=st.integers(12, 40), seed=st.integers(0, 10_000))
def test_i15_identical_inputs_give_one(channels: int, columns: int, seed: int) -> None:
    rows = noise(channels, columns, seed)
    assert svcca(rows, rows) == pytest.approx(1.0, abs=1e-9)


@given(
    channels=st.integers(5, 9),
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 10_000),
)
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
    held_out = [samples(spec, 16, seed)[0] for seed in (7, 8)]
    models = [_apart(dict(spec.weights), seed) for seed in range(3)]
    regions = synchronised(spec, "first_half", cut=3)

    before = similarities(spec, models, held_out)
    after = similarities(spec, averaged(models, regions), held_out)

    for unit in ("stem", "block1", "block2"):
        assert before[unit].largest < 1.0 - 1e-4
        assert (after[unit].mean, after[unit].largest) == pytest.approx((1.0, 1.0), abs=1e-9)
    for unit in ("block3", "head"):
        assert after[unit].largest < 1.0 - 1e-4


def _apart(weights: Tensors, seed: int) -> Tensors:
    """A client's own model: moving statistics have moved as well."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor * (1 + 0.5 * torch.rand(tensor.shape, generator=generator))
        + 0.1 * torch.rand(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }
