"""Folders of photos as the data of a federation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl.data import photos
from edgefl.errors import DataError
from edgefl.setup.data import open_data
from tests.device_runtime.data.files import image, written

COLOURS = {"cafe\u0301": 40, "dog": 200}


def folder_of(root: Path, count: int = 5) -> Path:
    for name, level in COLOURS.items():
        for number in range(count):
            image(root / name / f"{number}.png", np.full((6 + number, 5, 3), level, np.uint8))
        written(root / name / "Thumbs.db", b"no photo")
        written(root / name / "._0.png", b"no photo")
    written(root / ".DS_Store", b"no photo")
    return root


def test_a_fifth_of_each_class_is_for_tests(tmp_path: Path) -> None:
    federation = edgefl.federation("cnn", data=str(folder_of(tmp_path / "photos")))
    found = open_data(federation)

    assert (found.train_x.shape, found.test_x.shape) == ((8, 3, 64, 64), (2, 3, 64, 64))
    assert found.names == ("caf\u00e9", "dog")
    for x, y in ((found.train_x, found.train_y), (found.test_x, found.test_y)):
        np.testing.assert_array_equal(x[:, 0, 0, 0], np.array([40, 200])[y])


def test_folders_for_training_and_tests_are_taken_as_they_are(tmp_path: Path) -> None:
    folder_of(tmp_path / "train", 3)
    folder_of(tmp_path / "val", 1)
    found = photos.load(tmp_path, 8)

    assert (len(found.train_x), len(found.test_x)) == (6, 2)


def test_a_photo_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    written(folder_of(tmp_path) / "dog" / "x.jpg", b"no photo")

    with pytest.raises(DataError, match=r"dog/x\.jpg: is no image that can be read"):
        photos.load(tmp_path, 8)


@pytest.mark.parametrize(
    ("name", "problem"), [("x.png", "in no class's folder"), ("cat/", "a class without photos")]
)
def test_what_a_device_would_refuse_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    found = folder_of(tmp_path) / name
    found.mkdir() if name.endswith("/") else written(found, b"")

    with pytest.raises(DataError, match=problem):
        photos.load(tmp_path, 8)


@pytest.mark.parametrize("classes", [0, 1])
def test_a_folder_without_classes_says_what_is_expected(tmp_path: Path, classes: int) -> None:
    for number in range(classes):
        image(tmp_path / str(number) / "a.png", np.zeros((4, 4, 3), np.uint8))

    with pytest.raises(DataError, match=f"expected folders of photos .* found {classes}"):
        photos.load(tmp_path, 8)
