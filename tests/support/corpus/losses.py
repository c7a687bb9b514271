# mypy: ignore-errors
"""Kind (b): losses of the user's own whose mean does not weigh samples alike."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import edgefl
from edgefl.contract.tensors import TensorSpec
from tests.support.case import ROW, Case

CASES: list[Case] = []


def classifier(classes: int = 3) -> nn.Module:
    """Return a small network of fixed initial weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, classes))


def add(name, function, *, classes=3, labels=None, make=None, sample=ROW, answers=None, expected="trains"):
    """Add a case whose loss is ``function``, in edgefl and in torch."""
    spec = labels or TensorSpec((), torch.int64, below=classes)

    def mean(out, y):
        loss = function(out, y)
        return loss if loss.dim() == 0 else loss.mean()

    CASES.append(
        Case(
            name,
            "b-loss",
            expected,
            make or partial(classifier, classes),
            sample,
            classes,
            edgefl.losses.own_loss(function, labels=spec),
            mean,
            spec,
            answers=answers,
        )
    )


W3 = torch.tensor([1.0, 4.0, 0.25])


def weights_by_closure():
    # The mean divides by the weights of the batch's labels.
    weight = torch.tensor([0.2, 3.0, 1.0])

    def loss(out, y):
        return F.cross_entropy(out, y, weight=weight)

    return loss


add("class_weights_closure", weights_by_closure())
add("class_weights_partial", partial(F.cross_entropy, weight=W3))
# The weight is a buffer of a criterion object.
add("class_weights_module", nn.CrossEntropyLoss(weight=W3))
add("class_weights_nll", lambda out, y: F.nll_loss(F.log_softmax(out, -1), y, weight=W3))
# One rare class of ten has another weight: random labels hardly ever hold it.
add("one_rare_weight_of_ten", nn.CrossEntropyLoss(weight=torch.tensor([1.0] * 9 + [30.0])), classes=10)
add("weights_and_smoothing", nn.CrossEntropyLoss(weight=W3, label_smoothing=0.2))
add("smoothing_only", nn.CrossEntropyLoss(label_smoothing=0.3))
# Ignored labels leave the mean.
add("ignore_index_class_zero", partial(F.cross_entropy, ignore_index=0))
add("ignore_index_last_class", nn.CrossEntropyLoss(ignore_index=2, weight=W3))
# A sum is six times a mean.
add("reduction_sum", nn.CrossEntropyLoss(reduction="sum"))
add("sum_over_batch_size", lambda out, y: F.cross_entropy(out, y, reduction="sum") / 4)
add("weights_indexed_per_sample", lambda out, y: W3[y] * F.cross_entropy(out, y, reduction="none"))
# Normalised by hand: samples of one batch share a denominator.
add(
    "weights_normalised_by_hand",
    lambda out, y: (W3[y] * F.cross_entropy(out, y, reduction="none")).sum() / W3[y].sum(),
)


class Focal(nn.Module):
    """Focal loss with class weights as a buffer."""

    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = gamma
        self.register_buffer("alpha", torch.tensor([0.5, 2.0, 1.0]))

    def forward(self, out, y):
        logp = F.cross_entropy(out, y, weight=self.alpha, reduction="none")
        plain = F.cross_entropy(out, y, reduction="none")
        return ((1 - torch.exp(-plain)) ** self.gamma * logp).sum() / self.alpha[y].sum()


add("focal_module", Focal())


def dice(out, y):
    """Return the mean dice loss of the classes, over the batch."""
    p, t = out.softmax(1), F.one_hot(y, 3)
    return 1 - ((2 * (p * t).sum(0) + 1) / ((p + t).sum(0) + 1)).mean()


add("dice_of_one_hot_labels", dice)


class Balanced:
    """Callable object with weights made from counts."""

    def __init__(self, counts):
        self.weight = counts.sum() / (len(counts) * counts)

    def __call__(self, out, y):
        return F.cross_entropy(out, y, self.weight)


add("weights_from_counts_object", Balanced(torch.tensor([50.0, 5.0, 20.0])))
add(
    "pos_weight_bce",
    nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 5.0, 0.5])),
    labels=TensorSpec((3,)),
    answers=lambda g, rows: (torch.rand((rows, 3), generator=g) < 0.4).float(),
)
add(
    "masked_regression",
    # Targets that are not known (negative) leave the mean.
    lambda out, y: ((out - y) ** 2 * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
    labels=TensorSpec((3,)),
)
# Its gradient has no form.
add("margin_with_weights", partial(F.multi_margin_loss, weight=W3), expected="refused")


class Tagger(nn.Module):
    """One label for each token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.embed(x)).transpose(1, 2)


def padded(generator, rows):
    """Return labels with padding of unequal lengths."""
    y = torch.randint(0, 4, (rows, 6), generator=generator)
    for row in range(rows):
        y[row, 1 + row % 5 :] = -100
    return y


TAGS = TensorSpec((6,), torch.int64, below=4, ignored=-100)
TOKENS = TensorSpec((6,), torch.int64, below=11)
# The default ignore_index: every token of the batch weighs the same, not every sample.
add(
    "padded_tokens_mean",
    nn.CrossEntropyLoss(),
    classes=4,
    labels=TAGS,
    make=Tagger,
    sample=TOKENS,
    answers=padded,
)
add(
    "padded_tokens_weighted",
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5, 1.0])),
    classes=4,
    labels=TAGS,
    make=Tagger,
    sample=TOKENS,
    answers=padded,
)
# Samples see each other beyond a weighted mean: either a trace of the whole batch, or a refusal.
add("batch_standardised", lambda out, y: F.cross_entropy((out - out.mean(0)) / (out.std(0) + 1e-3), y))
add(
    "top_k_hard_examples",
    lambda out, y: F.cross_entropy(out, y, reduction="none").topk(3)[0].mean(),
    expected="refused",
)
