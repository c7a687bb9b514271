"""Rows of `python -m benchmarks simulate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.simulate import TASKS, SimulationTask, engines, limit, measure, operations, skewed
from benchmarks.workers.simulation import MODELS, JobFolder
from edgefl.data.datasets import load
from edgefl.errors import ConfigError, EdgeflError

TINY = SimulationTask("tiny", "small", {"name": "digits", "partition": "iid"}, 20, 4, 3, 2, 5, 0.1)


@pytest.mark.slow
def test_a_row_tells_speed_memory_and_accuracy_of_a_whole_simulation() -> None:
    row = measure(TINY, engines()["edgefl"])
    assert (row.task, row.engine, row.clients, row.per_round, row.rounds) == ("tiny", "edgefl", 20, 4, 2)
    assert row.clients_per_s == pytest.approx(8 / row.seconds, rel=0.05)
    assert row.limit_clients_per_s > 0
    assert 50 << 20 < row.peak_rss_bytes < 4 << 30
    assert 0.15 < row.final_accuracy < 1.0


def test_the_limit_counts_each_convolution_and_product_of_a_step() -> None:
    """Of pfl's CNN, per sample: 900 and 784 places, then two dense layers; no gradient of the images is made."""
    first, second, dense, last = (2 * n for n in (900 * 27 * 32, 784 * 288 * 64, 12544 * 128, 128 * 10))
    made = operations(MODELS["pfl_cnn"](), torch.zeros(10, 3, 32, 32))
    assert made == 10 * (2 * first + 3 * (second + dense + last))
    task = replace(TINY, model="logistic", steps=2, batch=10)
    assert limit(task, (1, 28, 28), 1e9) == pytest.approx(1e9 / (2 * 10 * 2 * 2 * 7840))


def test_others_are_given_the_same_rows_as_floats(tmp_path: Path) -> None:
    TINY.write(tmp_path, {})
    work, dataset = JobFolder(tmp_path), load("digits")
    x, y = work.client(3, np.random.default_rng(0))
    assert x.shape == (10, 1, 8, 8) and x.dtype == np.float32 and y.shape == (10,)
    assert sum(work.examples(client) for client in range(20)) == len(dataset.train_y)
    known = {row.tobytes() for row in work.floats(dataset.train_x)}
    assert {row.tobytes() for row in x} <= known
    assert 0.0 <= work.accuracy(lambda samples: np.zeros(len(samples))) < 0.2


def test_skewed_clients_have_two_classes_and_sizes_of_a_power_law() -> None:
    dealt = skewed(load("digits"), 20)
    assert dealt.owners is not None
    labels = [{*dealt.train_y[dealt.owners == owner].tolist()} for owner in range(20)]
    assert all(own <= {client % 10, (client + 1) % 10} for client, own in enumerate(labels))
    sizes = np.bincount(dealt.owners)
    assert sizes.max() > 3 * sizes.min()


@pytest.mark.slow
def test_what_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--rounds"):
        measure(TINY, engines()["edgefl"], rounds=1)

    def offline(*_: object) -> str:
        raise EdgeflError("pfl cannot be installed: no network")

    monkeypatch.setattr("benchmarks.simulate.make", offline)
    with pytest.raises(EdgeflError, match="pfl cannot be installed: no network"):
        measure(TINY, engines()["pfl"])
    with pytest.raises(EdgeflError, match=r"-m edgefl simulate ended: .*nothing"):
        measure(replace(TINY, model="nothing"), engines()["edgefl"])
    assert {name for name, sizes in TASKS.items() if len(sizes) > 1} == {"linear"}
