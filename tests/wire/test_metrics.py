"""Metrics from sums that add up over rows and batches, beside scikit-learn's on all rows at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl.contract.tensors import TensorSpec, arrays
from edgefl.models.losses import (
    BinaryCrossEntropy,
    CausalLM,
    CrossEntropy,
    Huber,
    InfoNCE,
    Loss,
    NTXent,
    OwnLoss,
    Quantile,
    SequenceCrossEntropy,
)
from edgefl.models.losses.loss import metrics_of, sums_of
from edgefl.wire.metrics import Sums, add_sums, compute_metrics
from tests.support.errors import ModelError, refuses

ROWS = 60


def f1_score(*arrays: object, **options: object) -> float:
    from sklearn import metrics  # a second of each test process that needs none

    return float(metrics.f1_score(*arrays, **options))


def jaccard_score(*arrays: object, **options: object) -> float:
    from sklearn import metrics

    return float(metrics.jaccard_score(*arrays, **options))


SPLIT = 25
GARBAGE = 4


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(seed))


def classes(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, (ROWS, *shape), generator=torch.Generator().manual_seed(7))


def in_two_batches(loss: Loss, out: Tensor, y: Tensor) -> Sums:
    """The sums of all rows: two batches, the second one filled up by rows that do not count."""
    fill = torch.arange(GARBAGE)
    rest = torch.cat((torch.arange(SPLIT, ROWS), fill))
    mask = torch.ones(len(rest))
    mask[-GARBAGE:] = 0.0
    sums = add_sums({}, arrays(sums_of(loss, out[:SPLIT], y[:SPLIT], torch.ones(SPLIT))))
    return add_sums(sums, arrays(sums_of(loss, out[rest], y[rest], mask)))


def values(loss: Loss, out: Tensor, y: Tensor) -> dict[str, float]:
    return compute_metrics(metrics_of(loss, TensorSpec(tuple(out.shape[1:]))), in_two_batches(loss, out, y))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_f1_of_classes_equals_scikit_learn(count: int) -> None:
    out, y = drawn((count,)), classes(count)

    found = values(CrossEntropy(), out, y)

    average = "binary" if count == 2 else "macro"
    assert found["f1"] == pytest.approx(f1_score(y, out.argmax(1), average=average), abs=1e-7)
    assert found["accuracy"] == pytest.approx(float((out.argmax(1) == y).float().mean()), abs=1e-7)
    assert list(found) == ["accuracy", "f1", "loss"]


def test_f1_of_one_logit_is_that_of_its_class() -> None:
    out, y = drawn((1,)), classes(2)
    assert values(CrossEntropy(), out, y)["f1"] == pytest.approx(f1_score(y, out[:, 0] > 0), abs=1e-7)


def test_f1_of_several_labels_equals_scikit_learn() -> None:
    out, y = drawn((5,)), classes(2, 5).float()
    found = values(BinaryCrossEntropy(), out, y)
    assert found["f1"] == pytest.approx(f1_score(y, out > 0, average="macro"), abs=1e-7)
    assert found["accuracy"] == pytest.approx(float(((out > 0) == (y > 0)).float().mean()), abs=1e-6)


@pytest.mark.parametrize("ignored", [None, 255])
def test_metrics_of_pixels_equal_scikit_learn(ignored: int | None) -> None:
    out, y = drawn((4, 3, 5)), classes(4, 3, 5)
    if ignored is not None:
        y = torch.where(drawn((3, 5), 1) > 0.8, torch.full_like(y, ignored), y)
    counted = torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored
    true, said = y[counted], out.argmax(1)[counted]

    found = values(CrossEntropy(ignore_index=ignored), out, y)

    assert found["f1"] == pytest.approx(f1_score(true, said, average="macro"), abs=1e-7)
    assert found["iou"] == pytest.approx(jaccard_score(true, said, average="macro"), abs=1e-7)
    assert found["accuracy"] == pytest.approx(float((true == said).double().mean()), abs=1e-6)
    assert next(iter(found)) == "accuracy"


def test_a_class_that_neither_occurs_nor_is_said_has_no_part_in_f1() -> None:
    out = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0, 9, 0]])
    y = torch.tensor([0, 1, 0])
    sums = add_sums({}, sums_of(CrossEntropy(), out, y, torch.ones(3)))
    assert compute_metrics(["f1"], sums)["f1"] == pytest.approx(f1_score(y, out.argmax(1), average="macro"))


LANGUAGE = [
    SequenceCrossEntropy(),
    SequenceCrossEntropy(ignore_index=-100, label_smoothing=0.3),
    CausalLM(),
    CausalLM(label_smoothing=0.1, ignore_index=None),
]


@pytest.mark.parametrize("loss", LANGUAGE, ids=str)
def test_perplexity_of_a_uniform_model_is_its_vocabulary(loss: Loss) -> None:
    vocabulary, y = 11, classes(11, 6)
    if loss.label(TensorSpec((6, vocabulary))).ignored is not None:
        y[:, 3:] = torch.where(drawn((3,)) > 0, torch.full_like(y[:, 3:], -100), y[:, 3:])
    out = torch.full((ROWS, 6, vocabulary), 0.7)
    assert values(loss, out, y)["perplexity"] == pytest.approx(vocabulary, rel=1e-5)


def test_perplexity_weighs_tokens_alike_however_long_their_sample_is() -> None:
    out, y = drawn((6, 5)), classes(5, 6)
    for row in range(ROWS):
        y[row, 1 + row % 6 :] = -100
    found = values(SequenceCrossEntropy(ignore_index=-100), out, y)

    wanted = torch.nn.functional.cross_entropy(out.transpose(1, 2), y, ignore_index=-100)
    assert found["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-5)
    assert found["loss"] == pytest.approx(float(wanted), rel=1e-5)
    right = (out.argmax(2) == y)[y != -100].double().mean()
    assert found["accuracy"] == pytest.approx(float(right), abs=1e-6)


def test_mae_is_the_mean_distance_and_that_of_the_median_level() -> None:
    out, y = drawn((2, 3)), drawn((2, 3), 1)
    found = values(Huber(), out, y)
    assert found["mae"] == pytest.approx(float((out - y).abs().mean()), rel=1e-5)
    assert list(found) == ["mae", "loss"]
    levels = Quantile(levels=(0.1, 0.5, 0.9))
    assert values(levels, out, y[:, :, 0])["mae"] == pytest.approx(
        float((out[..., 1] - y[:, :, 0]).abs().mean()), rel=1e-5
    )


@pytest.mark.parametrize("loss", [InfoNCE(), NTXent()], ids=str)
def test_rows_that_fill_up_a_batch_are_no_contrast_to_the_others(loss: Loss) -> None:
    out, y = drawn((2, 5)), classes(2)
    mask = torch.ones(ROWS)
    mask[SPLIT:] = 0.0

    masked = sums_of(loss, out, y, mask)
    alone = sums_of(loss, out[:SPLIT], y[:SPLIT], torch.ones(SPLIT))

    assert masked.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(masked[name], value)
    other = out.clone()
    other[SPLIT:] += 3.0
    assert torch.equal(sums_of(loss, other, y, mask)["loss_sum"], masked["loss_sum"])


def test_a_function_has_no_metric_but_its_loss() -> None:
    loss = OwnLoss(torch.nn.functional.mse_loss, TensorSpec((3,)))
    out, y = drawn((3,)), drawn((3,), 1)
    assert values(loss, out, y) == {"loss": pytest.approx(float((out - y).square().mean()), rel=1e-5)}


def test_nothing_to_measure_is_no_number_and_an_unknown_metric_is_named() -> None:
    y = torch.full((2, 3), -100)
    sums = add_sums(
        {}, sums_of(SequenceCrossEntropy(ignore_index=-100), torch.randn(2, 3, 4), y, torch.ones(2))
    )
    assert all(math.isnan(value) for value in compute_metrics(["perplexity", "accuracy"], sums).values())
    assert compute_metrics(["perplexity"], {**sums, "nll": np.array(9000.0), "tokens": np.array(1.0)})[
        "perplexity"
    ] == pytest.approx(math.inf)
    with refuses(ModelError, unknown=["bleu"]):
        compute_metrics(["bleu"], sums)
