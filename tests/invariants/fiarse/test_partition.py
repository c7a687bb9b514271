"""FIARSE's balanced partition (fiarse.md 4.2): equal sizes, and each client's own mix of classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgefl
from edgefl.config import parse
from edgefl.data.equal import dirichlet_clients
from edgefl.data.partition import histograms
from edgefl.setup.data import held_out, open_data, partition
from edgefl.setup.model import federation_model
from tests.support.errors import DataError, refuses


def test_a_hundred_clients_have_mixes_as_skewed_as_drawn() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
    parts = dirichlet_clients(labels, 100, alpha=0.3, seed=1)
    shares = histograms(labels, parts, 10) / 500

    assert {len(part) for part in parts} == {500}
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(50_000))
    # E sum p^2 of Dirichlet(a 1_C) is (a + 1) / (C a + 1): 0.325. Classes that run out make mixes a little more even.
    assert (shares**2).sum(axis=1).mean() == pytest.approx(1.3 / 4.0, abs=0.05)
    assert 0.0 < (shares == 0.0).mean() < 0.5


@given(st.integers(1, 30), st.integers(0, 2**32 - 1), st.sampled_from([1e-6, 0.1, 1.0, 100.0]))
def test_every_row_is_used_once_and_sizes_are_equal(clients: int, seed: int, alpha: float) -> None:
    labels = np.random.default_rng(seed).integers(0, 7, 200) ** 2
    parts, again = (dirichlet_clients(labels, clients, alpha=alpha, seed=seed) for _ in range(2))

    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(200))
    assert np.ptp([len(part) for part in parts]) <= 1
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_a_large_alpha_gives_alike_clients_and_a_small_one_few_classes() -> None:
    labels = np.repeat(np.arange(10), 1000)
    alike, apart = (
        histograms(labels, dirichlet_clients(labels, 20, alpha=a, seed=2), 10) for a in (1e4, 0.01)
    )

    assert alike.min() > 20 and (apart > 0).sum(axis=1).mean() < 4


def test_it_is_asked_for_in_a_file_and_refused_where_it_cannot_be() -> None:
    tables = {"data": {"name": "digits", "partition": "dirichlet_clients", "alpha": 0.5}}
    federation = parse(tables, source="a test")
    assert sorted({*map(len, partition(federation, open_data(federation), 10))}) == [143, 144]
    with refuses(DataError, samples=3, clients=4):
        dirichlet_clients(np.arange(3), 4, alpha=1.0, seed=0)
    with refuses(DataError, alpha=0.0):
        dirichlet_clients(np.arange(3), 2, alpha=0.0, seed=0)


def test_test_samples_have_each_client_s_own_mix_in_equal_sizes() -> None:
    tables = {"data": {"name": "digits", "partition": "dirichlet_clients", "alpha": 0.3, "test_samples": 0}}
    federation = parse(tables, source="a test")
    dataset = open_data(federation)
    parts = partition(federation, dataset, 5)
    mixes, own = (
        histograms(labels, rows, dataset.classes)
        for labels, rows in (
            (dataset.train_y, parts),
            (dataset.test_y, held_out(federation, dataset, parts)),
        )
    )
    sizes = own.sum(axis=1, keepdims=True)
    assert np.ptp(sizes) <= dataset.classes and not own[mixes == 0].any()
    assert np.abs(own / sizes - mixes / mixes.sum(axis=1, keepdims=True)).max() < 1.5 / sizes.min()


def test_clients_lack_classes_so_that_the_masked_loss_acts(tmp_path: Path) -> None:
    """One client trains for a round: its absent classes keep their weights with the masked loss only."""
    unmoved = {}
    for masked in (True, False):
        tables = {
            "federation": {"rounds": 1},
            "model": {"name": "mlp", "options": {"hidden": [8], "initial": "torch"}},
            "algorithm": {"batch": 16, "steps": 20, "lr": 0.1, "momentum": 0.0, "masked_loss": masked},
            "data": {"name": "digits", "partition": "dirichlet_clients", "alpha": 0.3, "test_samples": 50},
            "round": {"fraction": 1 / 12},
            "tiers": {"strong": {"kind": "width", "gamma": 0.5, "options": {"scaler": True}, "count": 12}},
        }
        federation = parse(tables, source="a test")
        trained = edgefl.simulate(federation, tmp_path / str(masked)).model
        dataset = open_data(federation)
        initial = federation_model(federation, dataset).weights["head.dense.bias"].numpy()
        unmoved[masked] = np.isclose(trained["head.dense.bias"], initial, rtol=0, atol=1e-6).tolist()
    absent = histograms(dataset.train_y, partition(federation, dataset, 12), dataset.classes) == 0
    assert absent.any(axis=1).mean() > 0.5
    assert any(unmoved[True]) and unmoved[True] in absent.tolist()
    assert not any(unmoved[False])
