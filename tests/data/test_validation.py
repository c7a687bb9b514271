"""The validation split: a share of the training samples in place of the test samples (`data.validation`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgefl
from edgefl.config import Federation, parse
from edgefl.data.dataset import Dataset, OtherInput
from edgefl.setup.data import held_out, open_data, partition
from edgefl.wire.tensors import Array
from tests.support.errors import ConfigError, DataError, refuses

SAMPLES, TESTS = 200, 40


def _numbered(samples: int = SAMPLES) -> Dataset:
    """Every sample has a number of its own, and its label, owner and further input follow from it; tests are negative."""
    train, test = np.arange(samples), -1 - np.arange(TESTS)
    columns = [
        (np.repeat(rows, 16).astype(np.float32).reshape(-1, 1, 4, 4), rows % 4) for rows in (train, test)
    ]
    (train_x, train_y), (test_x, test_y) = columns
    others = {"number": OtherInput(train[:, None], test[:, None])}
    return Dataset(
        "numbered", train_x, train_y, test_x, test_y, 1.0, 0.0, 4, others=others, owners=train % 5, test_owners=test % 5
    )  # fmt: skip


def _numbers(x: Array) -> list[int]:
    return x.reshape(len(x), -1)[:, 0].astype(int).tolist()


def _federation(file: Path, seed: int = 0, **data: object) -> Federation:
    tables = {
        "federation": {"seed": seed, "rounds": 1},
        "data": {"name": "file", "file": str(file), "test_samples": 0, **data},
        "model": {"name": "mlp", "options": {"hidden": [4]}},
        "algorithm": {"batch": 4, "steps": 2},
        "tiers": {"strong": {"count": 4}},
    }
    return parse(tables, source="a test")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = _numbered()
    path = tmp_path / "numbered.npz"
    np.savez(path, train_x=made.train_x, train_y=made.train_y, test_x=made.test_x, test_y=made.test_y)
    return path


@given(share=st.floats(0.01, 0.99), samples=st.integers(100, 300), most=st.integers(0, 60))
def test_both_parts_are_training_samples_with_all_that_belongs_to_them(
    share: float, samples: int, most: int
) -> None:
    whole = _numbered(samples)
    split = whole.validation_split(share, most)
    train, validation = _numbers(split.train_x), _numbers(split.test_x)
    everything = _numbers(whole.validation_split(share).test_x)

    assert sorted(train + everything) == list(range(samples))
    assert len(everything) == round(share * samples)
    assert set(validation) <= set(everything) and len(validation) == min(len(everything), most or samples)
    for numbers, labels, owners, other in (
        (train, split.train_y, split.owners, split.others["number"].train),
        (validation, split.test_y, split.test_owners, split.others["number"].test),
    ):
        assert numbers == _numbers(other) and labels.tolist() == [number % 4 for number in numbers]
        assert owners is not None and owners.tolist() == [number % 5 for number in numbers]


@pytest.mark.parametrize("way", ["iid", "dirichlet", "dirichlet_clients", "labels", "shards"])
def test_no_device_gets_a_validation_sample_and_seeds_agree_on_them(file: Path, way: str) -> None:
    validation = []
    for seed in range(3):
        federation = _federation(file, seed, validation=0.2, partition=way, train_samples=150)
        dataset = open_data(federation)
        parts = partition(federation, dataset, 4)
        trained = _numbers(dataset.train_x[np.concatenate(parts)])
        validation.append(_numbers(dataset.test_x))
        assert not {*trained} & {*validation[-1]} and min(trained) >= 0 and len({*trained}) == 150
        own = held_out(federation, dataset, parts)
        assert {*_numbers(dataset.test_x[np.concatenate(own)])} <= {*validation[-1]}
    assert validation[0] == validation[1] == validation[2] and len(validation[0]) == 40


def test_a_limit_of_test_samples_takes_the_same_ones_for_every_seed(file: Path) -> None:
    few = [
        _numbers(open_data(_federation(file, seed, validation=0.2, test_samples=10)).test_x)
        for seed in (1, 2)
    ]
    assert few[0] == few[1] and len(few[0]) == 10


def test_a_simulation_never_reads_the_test_samples(file: Path, tmp_path: Path) -> None:
    found = []
    for number in range(2):
        if number:
            with np.load(file) as arrays:
                np.savez(file, **{**arrays, "test_x": 1e3 - arrays["test_x"], "test_y": 3 - arrays["test_y"]})
        run = edgefl.simulate(_federation(file, validation=0.3), tmp_path / str(number))
        found.append(([round.accuracy for round in run.history], run.model))
        recorded = (tmp_path / str(number)).glob("*.toml")
        assert any("validation = 0.3" in path.read_text() for path in recorded)
    (accuracies, model), (again, other) = found
    assert accuracies == again and None not in accuracies and accuracies
    assert all(np.array_equal(values, other[name]) for name, values in model.items())


def test_a_split_without_samples_is_refused(file: Path) -> None:
    with refuses(DataError, share=0.001, samples=SAMPLES):
        open_data(_federation(file, validation=0.001))
    with refuses(DataError, share=0.999, samples=SAMPLES):
        open_data(_federation(file, validation=0.999))
    for data in ({"validation": 1.0}, {"validation": 0.1, "devices_dir": str(file.parent)}):
        with pytest.raises(ConfigError, match="validation"):
            _federation(file, **data)
