"""What `[data]` of a federation file makes of a dataset: the scale of its pixels, and warnings about small shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgefl.config import Federation, parse
from edgefl.data.dataset import Dataset
from edgefl.setup.data import open_data, partition
from edgefl.wire.errors import DataError


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
    with pytest.raises(DataError, match="has no training samples to spread over 3 devices: add train_x"):
        partition(_federation(), opened, 3)
    with pytest.raises(DataError, match="one sample at least to test on"):
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
