"""From a model to a bundle and a device's round in Python, without a file or a broker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import edgefl
from edgefl.data.dataset import Dataset
from edgefl.errors import BundleError, ConfigError
from edgefl.wire.tensors import Array

CLASSES = 3


def tiny() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def images(count: int, seed: int = 0) -> tuple[Array, Array]:
    """Images whose class is told by their brightest third, so that a few steps learn it."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, count)
    x = rng.integers(0, 64, (count, 1, 4, 4), dtype=np.uint8)
    for row, label in enumerate(y):
        x[row, 0, label] += 128
    return x, y


@pytest.fixture(scope="module")
def data() -> Dataset:
    return edgefl.data.Dataset.of(*images(60), *images(30, seed=1), name="stripes")


@pytest.fixture(scope="module")
def bundle(data: Dataset) -> edgefl.Bundle:
    return edgefl.compile(
        tiny,
        data=data,
        tier="whole",
        training=edgefl.Training(algorithm=edgefl.algorithms.SGD(lr=0.2, steps=8, batch=16)),
    )


def test_a_bundle_agrees_with_torch_and_is_itself_after_a_file(bundle: edgefl.Bundle, tmp_path: Path) -> None:
    assert bundle.verify(seed=3).ok

    path = bundle.save(tmp_path / "made" / "whole.efl")
    read = edgefl.Bundle.load(path)

    assert read == bundle
    assert read.digest == bundle.digest
    assert "tier='whole', algorithm='sgd'" in repr(read)
    with pytest.raises(BundleError, match=r"a folder; name one of its bundles: .*whole\.efl"):
        edgefl.Bundle.load(path.parent)


def test_rounds_on_a_device_learn_what_the_server_would_average(bundle: edgefl.Bundle, data: Dataset) -> None:
    weights = bundle.initial_weights()
    for number in range(1, 4):
        result = edgefl.train_round(
            bundle, bundle.share(weights, number), data.train_x, data.train_y, seed=number
        )
        weights = {**weights, **result.update}

    assert result.samples == len(data.train_y)
    assert result.metrics["loss"] < 0.5
    assert _accuracy(weights, data) > 0.9


def test_the_same_seed_gives_the_same_update(bundle: edgefl.Bundle, data: Dataset, tmp_path: Path) -> None:
    path, weights = bundle.save(tmp_path / "whole.efl"), bundle.initial_weights()
    first, second = (
        edgefl.train_round(each, weights, data.train_x, data.train_y, seed=7, samples=20)
        for each in (bundle, path)
    )
    assert all(np.array_equal(first.update[name], second.update[name]) for name in first.update)
    assert first.samples == 20


def test_a_tier_gets_its_own_weights_from_its_bundle(data: Dataset, tmp_path: Path) -> None:
    half = edgefl.compile(
        tiny,
        data=data,
        submodel=edgefl.submodels.Width(gamma=0.5),
        training=edgefl.Training(algorithm=edgefl.algorithms.SGD(steps=1), codec=edgefl.codecs.Int8()),
    )
    weights = half.initial_weights()
    share = half.share(weights)
    result = edgefl.train_round(half, share, data.train_x, data.train_y)

    assert sum(each.size for each in share.values()) < sum(each.size for each in weights.values())
    assert result.update
    loaded = edgefl.Bundle.load(half.save(tmp_path / "half.efl"))
    with pytest.raises(BundleError, match="read from a file, which does not say how the tier is cut"):
        loaded.share(weights)


def _accuracy(weights: dict[str, Array], data: Dataset) -> float:
    x = data.read(data.test_x).reshape(len(data.test_y), -1)
    hidden = np.maximum(x @ weights["1.weight"].T + weights["1.bias"], 0)
    logits = hidden @ weights["3.weight"].T + weights["3.bias"]
    return float((logits.argmax(1) == data.test_y).mean())


def test_data_are_named_as_in_a_federation(data: Dataset, bundle: edgefl.Bundle, tmp_path: Path) -> None:
    training = edgefl.algorithms.SGD(lr=0.2, steps=8, batch=16)
    for source in (
        data.save(tmp_path / "mine.npz"),
        edgefl.config.DataTable(name="file", file=str(tmp_path / "mine.npz")),
    ):
        made = edgefl.compile(
            tiny, data=source, submodel=None, tier="whole", training=edgefl.Training(algorithm=training)
        )
        assert made.manifest.data == bundle.manifest.data
    assert edgefl.compile("mlp", data="digits").manifest.data.shape == (1, 8, 8)


def test_what_a_bundle_from_a_file_does_not_say_is_asked_for(bundle: edgefl.Bundle, tmp_path: Path) -> None:
    read = edgefl.Bundle.load(bundle.save(tmp_path / "whole.efl"))
    with pytest.raises(ConfigError, match="made with model 'tiny', which edgefl does not bring"):
        read.verify()


def test_results_are_printed_in_a_few_words(bundle: edgefl.Bundle, data: Dataset) -> None:
    assert repr(data) == "Dataset('stripes', 60 train and 30 test images (1, 4, 4), 3 classes)"

    result = edgefl.train_round(bundle, bundle.initial_weights(), data.train_x, data.train_y)
    assert repr(result).startswith("RoundResult(loss=")
    assert repr(result).endswith("60 samples, 4 arrays in the update, 0 arrays kept)")

    check = bundle.verify()
    assert str(check) == f"all {len(check.graphs)} graphs agree with torch"
    wrong = replace(check, problems=("the phases differ",))
    assert str(wrong) == "the phases differ"
