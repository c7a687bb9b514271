"""Losses. Each is compared with its gradients with respect to predictions and, where torch has them, targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.parity.ops.case import LABELS, Case, Family, Labels, Mask, Uniform, agrees, every

LOGITS, CLASSES = (8, LABELS), Labels((8,))
TOKENS, TOKEN_CLASSES = (3, LABELS, 5), Labels((3, 5))
PIXELS, PIXEL_CLASSES = (2, LABELS, 3, 5), Labels((2, 3, 5))
ROWS = (4, 6)
BIT = Uniform(ROWS)
WEIGHT = [0.5, 1.0, 2.0, 0.1]


def cross_entropy(*, weighted: bool = False, **options: Any) -> Any:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        weight = torch.tensor(WEIGHT, dtype=x.dtype) if weighted else None
        return F.cross_entropy(x, y, weight, **options)

    return loss


def nll(*, weighted: bool = False, **options: Any) -> Any:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        weight = torch.tensor(WEIGHT, dtype=x.dtype) if weighted else None
        return F.nll_loss(F.log_softmax(x, 1), y, weight, **options)

    return loss


def of(loss: Any, **options: Any) -> Any:
    return lambda *inputs: loss(*inputs, **options)


def soft(loss: Any, **options: Any) -> Any:
    """The loss with predictions squeezed into (0, 1)."""
    return lambda x, y: loss(torch.sigmoid(x), y, **options)


CASES: Family = {
    "cross_entropy": {
        "mean": Case(cross_entropy(), LOGITS, CLASSES),
        "sum": Case(cross_entropy(reduction="sum"), LOGITS, CLASSES),
        "none": Case(cross_entropy(reduction="none"), LOGITS, CLASSES),
        "weighted": Case(cross_entropy(weighted=True), LOGITS, CLASSES),
        "weighted, sum": Case(cross_entropy(weighted=True, reduction="sum"), LOGITS, CLASSES),
        "a label ignored": Case(cross_entropy(ignore_index=2), LOGITS, CLASSES),
        "a label ignored, none": Case(cross_entropy(ignore_index=2, reduction="none"), LOGITS, CLASSES),
        "a label out of range ignored": Case(
            lambda x, y: F.cross_entropy(x, torch.where(y == 1, -100, y)), LOGITS, CLASSES
        ),
        "smoothed": Case(cross_entropy(label_smoothing=0.1), LOGITS, CLASSES),
        "smoothed, sum": Case(cross_entropy(label_smoothing=0.1, reduction="sum"), LOGITS, CLASSES),
        "smoothed, none": Case(cross_entropy(label_smoothing=0.1, reduction="none"), LOGITS, CLASSES),
        "smoothed, weighted": Case(cross_entropy(label_smoothing=0.1, weighted=True), LOGITS, CLASSES),
        "smoothed, weighted, a label ignored": Case(
            cross_entropy(label_smoothing=0.1, weighted=True, ignore_index=2), LOGITS, CLASSES
        ),
        "sequences": Case(cross_entropy(), TOKENS, TOKEN_CLASSES),
        "sequences, none": Case(cross_entropy(reduction="none"), TOKENS, TOKEN_CLASSES),
        "sequences, all options": Case(
            cross_entropy(weighted=True, label_smoothing=0.1, ignore_index=0), TOKENS, TOKEN_CLASSES
        ),
        "images": Case(cross_entropy(), PIXELS, PIXEL_CLASSES),
        "images, weighted, a label ignored": Case(
            cross_entropy(weighted=True, ignore_index=0), PIXELS, PIXEL_CLASSES
        ),
        "images, none": Case(cross_entropy(reduction="none"), PIXELS, PIXEL_CLASSES),
        "probabilities as targets": Case(
            lambda x, y: F.cross_entropy(x, torch.softmax(y, 1)), LOGITS, LOGITS
        ),
        "one sample": Case(cross_entropy(), (LABELS,), Labels(())),
        "all labels ignored": Case(
            lambda x, y: torch.nan_to_num(F.cross_entropy(x, torch.full_like(y, -100))) + x.sum(),
            LOGITS,
            CLASSES,
        ),
        "an ignored label without probability": Case(
            lambda x, y: F.cross_entropy(
                x.masked_fill(torch.arange(x.shape[1]) == 0, -torch.inf),
                torch.where(y == 0, -100, y),
                reduction="sum",
            ),
            LOGITS,
            CLASSES,
        ),
        "labels of one byte": Case(lambda x, y: F.cross_entropy(x, y.to(torch.uint8)), LOGITS, CLASSES),
    },
    "nll_loss": {
        "mean": Case(nll(), LOGITS, CLASSES),
        "weighted, none": Case(nll(weighted=True, reduction="none"), LOGITS, CLASSES),
        "a label ignored": Case(nll(ignore_index=2), LOGITS, CLASSES),
        "sequences": Case(nll(weighted=True), TOKENS, TOKEN_CLASSES),
        "images": Case(nll(reduction="sum"), PIXELS, PIXEL_CLASSES),
    },
    "mse_loss": {
        "mean": Case(F.mse_loss, ROWS, ROWS),
        "sum": Case(of(F.mse_loss, reduction="sum"), ROWS, ROWS),
        "none": Case(of(F.mse_loss, reduction="none"), ROWS, ROWS),
    },
    "l1_loss": {
        "mean": Case(F.l1_loss, ROWS, ROWS),
        "sum": Case(of(F.l1_loss, reduction="sum"), ROWS, ROWS),
        "none": Case(of(F.l1_loss, reduction="none"), ROWS, ROWS),
    },
    "smooth_l1_loss": {
        "mean": Case(F.smooth_l1_loss, ROWS, ROWS),
        "own beta, sum": Case(of(F.smooth_l1_loss, beta=0.4, reduction="sum"), ROWS, ROWS),
        "none": Case(of(F.smooth_l1_loss, reduction="none"), ROWS, ROWS),
    },
    "huber_loss": {
        "mean": Case(F.huber_loss, ROWS, ROWS),
        "own delta, sum": Case(of(F.huber_loss, delta=0.4, reduction="sum"), ROWS, ROWS),
        "none": Case(of(F.huber_loss, reduction="none"), ROWS, ROWS),
    },
    "binary_cross_entropy": {
        "mean": Case(soft(F.binary_cross_entropy), ROWS, BIT),
        "sum": Case(soft(F.binary_cross_entropy, reduction="sum"), ROWS, BIT),
        "none": Case(soft(F.binary_cross_entropy, reduction="none"), ROWS, BIT),
        "weighted": Case(
            lambda x, y, w: F.binary_cross_entropy(torch.sigmoid(x), y, w), ROWS, BIT, Uniform((6,))
        ),
        "zeros and ones predicted": Case(
            lambda x, y: F.binary_cross_entropy((x * 2).clamp(0, 1), y), ROWS, BIT
        ),
    },
    "binary_cross_entropy_with_logits": {
        "mean": Case(F.binary_cross_entropy_with_logits, ROWS, BIT),
        "sum": Case(of(F.binary_cross_entropy_with_logits, reduction="sum"), ROWS, BIT),
        "none": Case(of(F.binary_cross_entropy_with_logits, reduction="none"), ROWS, BIT),
        "weighted": Case(F.binary_cross_entropy_with_logits, ROWS, BIT, Uniform((6,))),
        "weight of positives": Case(
            lambda x, y, p: F.binary_cross_entropy_with_logits(x, y, pos_weight=p), ROWS, BIT, Uniform((6,))
        ),
        "large logits": Case(lambda x, y: F.binary_cross_entropy_with_logits(x * 60, y), ROWS, BIT),
    },
    "kl_div": {
        "mean": Case(lambda x, y: F.kl_div(F.log_softmax(x, 1), y + 0.1), ROWS, BIT),
        "batch mean": Case(
            lambda x, y: F.kl_div(F.log_softmax(x, 1), y + 0.1, reduction="batchmean"), ROWS, BIT
        ),
        "logarithmic target": Case(
            lambda x, y: F.kl_div(F.log_softmax(x, 1), F.log_softmax(y, 1), log_target=True), ROWS, BIT
        ),
        "target with a gradient": Case(
            lambda x, y: F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1), reduction="sum"), ROWS, ROWS
        ),
    },
    "cosine_embedding_loss": {
        "": Case(lambda x, y, s: F.cosine_embedding_loss(x, y, s * 2.0 - 1), ROWS, ROWS, Mask((4,)))
    },
    "margins": {
        "hinge": Case(lambda x, y: F.hinge_embedding_loss(x, y * 2.0 - 1), ROWS, Mask(ROWS)),
        "ranking": Case(
            lambda x, y, s: F.margin_ranking_loss(x, y, s * 2.0 - 1, margin=0.1), ROWS, ROWS, Mask(ROWS)
        ),
        "triplet": Case(F.triplet_margin_loss, ROWS, ROWS, ROWS),
        "soft": Case(lambda x, y: F.soft_margin_loss(x, y * 2.0 - 1), ROWS, Mask(ROWS)),
    },
    "poisson_nll_loss": {"": Case(F.poisson_nll_loss, ROWS, BIT)},
}


@pytest.mark.sample(5)
@every(CASES)
def test_loss_equals_torch(case: Case, again: bool, form: str) -> None:
    agrees(case.step(again), form)
