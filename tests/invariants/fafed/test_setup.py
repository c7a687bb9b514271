"""FAFED invariants 21 and 22: partitions of three degrees, and the sizes of the models (fafed.md 4.1, 4.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgefl.config import parse
from edgefl.data.dataset import Array, Dataset
from edgefl.data.equal import dirichlet_equal, paired, similarity
from edgefl.data.partition import histograms
from edgefl.models.spec import ModelSpec
from edgefl.setup.data import partition
from reproduce.fafed.models import fafed_cifar, fafed_fashion, fafed_mnist
from tests.support.errors import ConfigError, DataError, ModelError, refuses

MNIST = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)


def spread(name: str, labels: Array, clients: int, seed: int, **options: Any) -> list[Array]:
    made = {"low": similarity, "medium": dirichlet_equal, "high": paired}[name]
    return made(labels, clients, seed=seed, **({"alpha": 1.0} if name == "medium" else {}) | options)


def is_a_disjoint_cover(labels: Array, parts: list[Array]) -> bool:
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


@pytest.mark.parametrize("counts", [(6000,) * 10, (5000,) * 10, MNIST], ids=["fashion", "cifar", "mnist"])
@pytest.mark.parametrize("name", ["low", "medium", "high"])
def test_21_twenty_clients_of_equal_size_share_all_samples(name: str, counts: tuple[int, ...]) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), counts))
    parts = spread(name, labels, 20, seed=1)
    held = (histograms(labels, parts, 10) > 0).sum(axis=1)
    assert is_a_disjoint_cover(labels, parts)
    assert {len(part) for part in parts} == {len(labels) // 20}
    if name != "low":
        assert set(held) == {10 if name == "medium" else 5}


@given(st.integers(1, 12), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 0.5, 1.0, 10.0]))
def test_21_medium_of_any_labels_has_every_class_at_every_client(pairs: int, seed: int, alpha: float) -> None:
    labels = np.random.default_rng(seed).integers(0, 10, 2000)
    parts = dirichlet_equal(labels, 2 * pairs, alpha=alpha, seed=seed)
    assert is_a_disjoint_cover(labels, parts)
    assert np.ptp([len(part) for part in parts]) <= 1
    assert histograms(labels, parts, 10).min() >= 1


@pytest.mark.parametrize("seed", range(3))
def test_21_medium_leaves_no_client_a_single_sample_of_a_class(seed: int) -> None:
    """Half of Dirichlet(0.05) is below 0.01; unraised, those entries would end at the one sample that all begin with."""
    labels = np.repeat(np.arange(10), 1000)
    assert histograms(labels, dirichlet_equal(labels, 10, alpha=0.05, seed=seed), 10).min() >= 2
    raw = np.random.default_rng(seed).dirichlet(np.full(10, 0.05), 10)
    assert (raw < 0.01).mean() > 0.4


@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_21_high_of_any_labels_has_complementary_halves_at_each_pair(pairs: int, seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 10, 2000)
    parts = paired(labels, 2 * pairs, seed=seed)
    held = histograms(labels, parts, 10) > 0
    assert is_a_disjoint_cover(labels, parts)
    assert np.all(held[::2].sum(axis=1) == 5) and np.array_equal(held[::2], ~held[1::2])


def test_21_high_divides_equal_classes_in_equal_parts() -> None:
    labels = np.repeat(np.arange(10), 600)
    table = histograms(labels, paired(labels, 20, seed=4), 10)
    assert set(table[table > 0]) == {60}
    assert set((table > 0).sum(axis=0)) == {10}


def test_21_low_is_nearly_alike_and_its_rest_is_sorted() -> None:
    labels = np.repeat(np.arange(10), 6000)
    tables = {
        percent: histograms(labels, similarity(labels, 20, percent=percent, seed=2), 10) / 3000
        for percent in (0.0, 95.0, 100.0)
    }
    apart = {percent: np.abs(table - 0.1).sum(axis=1).mean() / 2 for percent, table in tables.items()}
    assert apart[0.0] == pytest.approx(0.9)
    assert 0.9 * 0.05 < apart[95.0] < 0.9 * 0.05 + apart[100.0] + 0.01
    # Each client's sorted 150 rows are of a single class, beside 285 dealt of it.
    assert np.all(tables[95.0].max(axis=1) * 3000 > 285 + 150 - 60)


@pytest.mark.parametrize("name", ["low", "medium", "high"])
def test_21_a_seed_decides_the_partition(name: str) -> None:
    labels = np.repeat(np.arange(10), 100)
    first, again, other = (spread(name, labels, 10, seed=seed) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_21_partitions_that_cannot_be_say_what_to_change() -> None:
    labels = np.repeat(np.arange(10), 20)
    with refuses(DataError, percent=101):
        similarity(labels, 4, percent=101, seed=0)
    with refuses(DataError, samples=200, clients=201):
        similarity(labels, 201, seed=0)
    with refuses(DataError, clients=21, samples=200):
        dirichlet_equal(labels, 21, alpha=1.0, seed=0)
    with refuses(DataError, alpha=0.0):
        dirichlet_equal(labels, 2, alpha=0.0, seed=0)
    with refuses(DataError, clients=3, classes=10):
        paired(labels, 3, seed=0)
    with refuses(DataError, clients=4, classes=9):
        paired(labels[labels < 9], 4, seed=0)


def test_21_a_federation_file_names_the_three_degrees() -> None:
    labels = np.repeat(np.arange(10), 40)
    x = np.zeros((400, 1, 2, 2), np.uint8)
    dataset = Dataset("flat", x, labels, x[:1], labels[:1], 1.0, 0.0, 10)
    direct = {
        "similarity": similarity(labels, 8, percent=60.0, seed=2),
        "dirichlet_equal": dirichlet_equal(labels, 8, alpha=0.5, seed=2),
        "paired": paired(labels, 8, seed=2),
    }
    for name, wanted in direct.items():
        told = {"partition": name, "similarity": 60.0, "alpha": 0.5}
        federation = parse({"data": told, "federation": {"seed": 2}}, source="a test")
        parts = partition(federation, dataset, 8)
        assert all(np.array_equal(a, b) for a, b in zip(parts, wanted, strict=True))
    with refuses(ConfigError, keys=["data.similarity"]):
        parse({"data": {"similarity": 120}}, source="a test")


@pytest.mark.parametrize(
    ("model", "total", "sizes"),
    [
        (fafed_mnist, 431_080, {"conv1": 520, "conv2": 25_050, "dense1": 400_500, "head": 5_010}),
        (fafed_fashion, 26_620, {"conv1": 50, "conv2": 460, "dense1": 25_100, "head": 1_010}),
        (
            fafed_cifar,
            581_866,
            {"conv1": 448, "conv2": 4_640, "conv3": 18_496, "dense1": 524_800, "dense2": 32_832, "head": 650},
        ),
    ],
)
def test_22_the_models_have_the_paper_s_layers(
    model: Callable[[], ModelSpec], total: int, sizes: dict[str, int]
) -> None:
    spec = model()
    found = {
        unit: sum(parameter.numel() for parameter in module.parameters())
        for unit, module in spec.module.named_children()
    }
    assert found == sizes and sum(found.values()) == total
    assert spec.boundary(len(sizes)).shape == (10,)


def test_22_logits_are_linear_unless_the_flag_says_otherwise() -> None:
    x = torch.randn(64, 1, 28, 28, generator=torch.Generator().manual_seed(0)) * 3
    linear, squashed = (fafed_fashion(final_activation=on, initial="keras").module(x) for on in (False, True))
    assert linear.abs().max() > 1 and torch.equal(torch.tanh(linear), squashed)
    relu = fafed_mnist(final_activation=True).module(x)
    assert relu.min() == 0.0 and fafed_mnist().module(x).min() < 0


def test_22_an_image_too_small_for_the_pools_is_refused() -> None:
    with refuses(ModelError, size=10):
        fafed_mnist(size=10)
    assert fafed_fashion(size=10).boundary(2).shape == (10, 1, 1)
