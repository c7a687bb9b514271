"""What `[data]` of a federation file makes of a dataset: the scale of its pixels, and warnings about small shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.config import Federation, parse
from edgefl.data.dataset import Dataset
from edgefl.data.partition import by_shards
from edgefl.setup.data import held_out, open_data, own_data, partition
from tests.support.errors import ConfigError, DataError, refuses


def _federation(**data: object) -> Federation:
    return parse({"data": {"name": "digits", **data}, "federation": {"seed": 0}}, source="a test")


def test_pixels_are_standardised_or_in_0_to_1_as_the_file_says() -> None:
    standard, unit = open_data(_federation()), open_data(_federation(scale="unit"))
    floats = standard.read(standard.train_x)
    assert abs(floats.mean()) < 0.05 and abs(floats.std() - 1) < 0.05
    floats = unit.read(unit.train_x)
    assert floats.min() == 0.0 and floats.max() == 1.0
    assert "pixels in [0, 1]" in unit.name and np.array_equal(unit.train_x, standard.train_x)


def test_unit_scale_of_bytes_divides_by_255() -> None:
    unit = open_data(_federation(name="random", scale="unit", train_samples=10))
    assert unit.scale == pytest.approx(1 / 255) and unit.shift == 0.0


def test_a_server_s_own_file_needs_samples_to_test_on_alone(tmp_path: Path) -> None:
    x, y = np.arange(48, dtype=np.uint8).reshape(3, 1, 4, 4), np.array([0, 1, 1])
    np.savez(tmp_path / "test.npz", test_x=x, test_y=y)
    opened = open_data(_federation(name="file", file=str(tmp_path / "test.npz")))

    assert (opened.shape, opened.classes, opened.train_x.shape) == ((1, 4, 4), 2, (0, 1, 4, 4))
    assert abs(float(opened.read(opened.test_x).mean())) < 1e-5
    with refuses(DataError, data="test.npz", devices=3):
        partition(_federation(), opened, 3)
    with refuses(DataError, found=((0, 1, 4, 4), (0,))):
        Dataset.of(x, y, x[:0], y[:0])


def _small(samples: int) -> Dataset:
    x, labels = np.zeros((samples, 1, 2, 2), np.uint8), np.arange(samples) % 4
    return Dataset("small", x, labels, x[:1], labels[:1], 1.0, 0.0, 4)


def test_devices_with_fewer_than_ten_samples_are_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    parts = partition(_federation(alpha=5.0), _small(40), 5)
    printed = capsys.readouterr()
    fewest = min(map(len, parts))
    assert printed.out == "" and printed.err.startswith("warning: no Dirichlet draw with data.alpha 5 ")
    assert f"the smallest now has {fewest}. Raise data.alpha or data.train_samples" in printed.err


def test_devices_with_enough_samples_are_not_warned_about() -> None:
    said: list[str] = []
    partition(_federation(alpha=5.0), _small(400), 5, warn=said.append)
    assert said == []


def _places(folder: Path, *names: str) -> Federation:
    for name in names:
        if "." in name:
            (folder / name).write_bytes(b"")
        else:
            (folder / name).mkdir()
    return _federation(devices_dir=str(folder))


def test_devices_hold_what_lies_under_their_names(tmp_path: Path) -> None:
    federation = _places(tmp_path, "strong-0", "weak-0.csv", "weak-1.npz", "weak-10", "notes.txt", ".hidden")
    places = own_data(federation, ["strong-0", "weak-0", "weak-1"])

    assert {name: path.name for name, path in places.items()} == {
        "strong-0": "strong-0",
        "weak-0": "weak-0.csv",
        "weak-1": "weak-1.npz",
    }
    assert own_data(_federation(), ["strong-0"]) == {}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["strong-0"],
            r"device weak-0 has one file or folder of its name in .*, found strong-0: give it its data",
        ),
        (["strong-0", "weak-0", "weak-0.csv"], r"device weak-0 has one .* found weak-0, weak-0\.csv"),
    ],
)
def test_a_device_without_data_of_its_own_is_named(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        own_data(_places(tmp_path, *names), ["strong-0", "weak-0"])


def test_a_folder_of_devices_that_is_not_there_is_named(tmp_path: Path) -> None:
    with refuses(DataError, path=str(tmp_path / "nowhere")):
        own_data(_federation(devices_dir=str(tmp_path / "nowhere")), ["strong-0"])


def test_nothing_is_spread_over_devices_that_have_their_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"devices have their own data .*edgefl device personalize --data"):
        partition(_federation(devices_dir=str(tmp_path)), _small(40), 2)


def _said(owners: list[int], test_owners: list[int] | None) -> Dataset:
    """Two tokens of each, and the two that follow."""
    x, test_x = (np.zeros((len(each), 2), np.int64) for each in (owners, test_owners or [0] * 6))
    whose = {
        "owners": np.array(owners),
        "test_owners": None if test_owners is None else np.array(test_owners),
    }
    return Dataset("said", x, x, test_x, test_x, 1.0, 0.0, 5, below=5, **whose)


def test_owners_are_judged_on_what_is_theirs() -> None:
    data = _said([0, 0, 1, 1, 2, 3], [3, 0, 1, 2, 0, 1])
    federation = _federation(partition="owners")
    parts = partition(federation, data, 2)
    rows = held_out(federation, data, parts)

    assert data.owners is not None and data.test_owners is not None
    for part, own in zip(parts, rows, strict=True):
        assert {*data.owners[part]} == {*data.test_owners[own]}
    assert sorted(np.concatenate(rows).tolist()) == [*range(6)]
    with pytest.raises(DataError, match="1 of 2 devices have no test sample of their own owners"):
        held_out(federation, _said([0, 0, 1, 1], [0]), [np.array([0, 1]), np.array([2, 3])])


def test_samples_without_classes_and_owners_are_held_out_alike() -> None:
    data = _said([0, 1, 2, 3], None)
    rows = held_out(_federation(partition="iid"), data, [np.array([0, 1]), np.array([2, 3])])

    assert sorted(np.concatenate(rows).tolist()) == [*range(6)] and [*map(len, rows)] == [3, 3]


def test_whose_test_samples_are_stays_with_them_in_a_part_and_in_a_file(tmp_path: Path) -> None:
    data = _said([0, 1, 2], [5, 6, 7, 8])
    part, read = data.limited(0, 2, seed=1), Dataset.load(data.save(tmp_path / "said.npz"))

    assert part.test_owners is not None and len(part.test_owners) == len(part.test_x) == 2
    assert read.test_owners is not None and read.test_owners.tolist() == [5, 6, 7, 8]
    with pytest.raises(DataError, match="4 test samples have owners"):
        replace(data, test_owners=np.array([1]))


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    clients=st.integers(1, 9),
    per_client=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_shards_use_every_row_once(counts: list[int], clients: int, per_client: int, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    if len(labels) < clients * per_client:
        with refuses(DataError, samples=len(labels), clients=clients):
            by_shards(labels, clients, per_client=per_client, seed=seed)
        return
    parts = by_shards(labels, clients, per_client=per_client, seed=seed)

    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert max(map(len, parts)) - min(map(len, parts)) <= per_client
    # A piece crosses a border between labels only where one lies in it.
    pieces = clients * per_client
    assert sum(len(np.unique(labels[part])) for part in parts) <= pieces + len(counts) - 1
    again = by_shards(labels, clients, per_client=per_client, seed=seed)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_the_file_asks_for_shards() -> None:
    federation = _federation(partition="shards", shards_per_device=2)
    parts = partition(federation, open_data(federation), 10)
    assert len(parts) == 10 and sum(map(len, parts)) == 1437
