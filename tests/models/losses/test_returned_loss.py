"""A model that returns its own loss when it is given labels is trained by that loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.api.model import model_spec
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.losses import ModelLoss
from edgefl.models.losses.own import OwnLoss
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.zoo.basic import mlp
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.pairs import FORMATS
from tests.parity.forms import checked
from tests.support.gradients import assert_trains_as_torch

TOKENS, CLASSES = 5, 7
WORDS = TensorSpec((TOKENS,), torch.int64, CLASSES)


def _next_word(logits: Tensor, labels: Tensor, net: Reader) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def _smooth(logits: Tensor, labels: Tensor, net: Reader) -> Tensor:
    losses = net.criterion(logits.flatten(0, 1), labels.flatten()).reshape(labels.shape)
    return losses.mean() + 0.1 * net.scale * logits.square().mean()


class Reader(nn.Module):
    """A language model whose forward takes labels, with a mask beside the words."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Reader], Tensor] = _next_word) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(CLASSES, 6), nn.Linear(6, 6)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, CLASSES)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.loss = loss

    def forward(
        self, ids: Tensor, attention: Tensor | None = None, targets: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = torch.tanh(self.inner(self.embed(ids)))
        if attention is not None:
            x = x * attention.unsqueeze(-1)
        logits = self.head(self.drop(x))
        found = {"logits": logits}
        return found if targets is None else {"cost": self.loss(logits, targets, self), **found}


TAKEN = ModelLoss(labels="targets", key="cost")


def _spec(module: nn.Module, *, masked: bool = False) -> ModelSpec:
    sample = {"ids": WORDS, "attention": TensorSpec((TOKENS,))} if masked else WORDS
    return split(module, sample=sample, classes=CLASSES, loss=TAKEN, labels=WORDS)


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, CLASSES, (4, TOKENS), generator=generator) for _ in range(2))
    return x, y


def _of_two(logits: Tensor, labels: Tensor, net: Reader) -> Tensor:
    """Tokens weigh unequally, and samples have a part in each other's loss."""
    return _next_word(logits, labels, net) + logits.std(dim=0).mean()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("loss", "ignored"), [(_next_word, None), (_smooth, None), (_next_word, -100), (_of_two, -100)]
)
def test_loss_and_gradients_are_those_of_the_unedited_model(
    loss: Callable[[Tensor, Tensor, Reader], Tensor], ignored: int | None
) -> None:
    module = Reader(loss)
    module.drop.p = 0.0
    labels = TensorSpec((TOKENS,), torch.int64, CLASSES, ignored)
    spec = split(module, sample=WORDS, classes=CLASSES, loss=TAKEN, labels=labels)
    x, y = _batch()
    if ignored is not None:
        y[0, 2:], y[1], y[2, 1] = ignored, ignored, ignored

    found, _ = assert_trains_as_torch(module, spec, module(x, targets=y)["cost"], {"x": x, "y": y})

    assert len(spec.units) == 3 and isinstance(spec.loss, OwnLoss) and spec.label.ignored == ignored
    assert len(found) == len(list(module.parameters()))


@pytest.mark.slow
def test_the_last_units_train_by_it_with_a_second_input() -> None:
    module = Reader()
    spec = _spec(module, masked=True)
    assert dict(spec.others) == {"attention": TensorSpec((TOKENS,))}
    last = Objective.of(OutputSide(spec, 2))
    assert len(last.trainable) == 2 and last.labels(3).shape == (3, TOKENS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMATS)
def test_its_training_step_equals_torch(form: str) -> None:
    objective = Objective.of(OutputSide(_spec(Reader()), 1))
    assert checked(form, sgd(objective, batch=3).phases[0].function, 5).worst <= 1e-5


def test_it_is_named_in_a_call_and_needs_to_know_the_labels() -> None:
    assert edgefl.losses.ModelLoss(labels="targets", key="cost").name == "model"
    with pytest.raises(ModelError, match="does not say what labels it reads: give `data`, or"):
        model_spec(Reader(), sample=WORDS, classes=CLASSES, loss=TAKEN)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("module", "loss", "message"),
    [
        (
            Reader(lambda logits, y, net: net.inner.weight.square().sum() + logits.mean()),
            TAKEN,
            r"more than its output",
        ),
        (
            Reader(lambda logits, y, net: _next_word(logits, y, net) + (0.1 if net.training else 0.0)),
            TAKEN,
            r"by aten.add.Tensor.*0.1.* in training and by .*0.0.* in inference.*write the loss of training as a function",
        ),
        (
            Reader(
                lambda logits, y, net: F.cross_entropy(
                    logits.flatten(0, 1), y.flatten(), label_smoothing=0.1 if net.training else 0.0
                )
            ),
            TAKEN,
            "expected the same loss in both",
        ),
        (Reader(), ModelLoss(labels="targets"), r"no tensor 'loss'; it returns dict with cost"),
        (Reader(), ModelLoss(), r"unexpected keyword argument 'labels'"),
    ],
)
def test_a_loss_that_cannot_be_taken_is_refused(module: nn.Module, loss: ModelLoss, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        split(module, sample=WORDS, classes=CLASSES, loss=loss, labels=WORDS)


@pytest.mark.slow
def test_the_modes_of_the_module_are_left_as_they_were() -> None:
    module = Reader().train()
    module.inner.eval()
    _spec(module)
    assert module.training and module.drop.training and not module.inner.training


@pytest.mark.slow
def test_labels_that_the_model_counts_and_models_of_units_are_refused() -> None:
    for ignored in (0, -7):
        labels = TensorSpec((TOKENS,), torch.int64, CLASSES, ignored=ignored)
        with pytest.raises(
            ModelError, match=f"loss of Reader counts labels of {ignored}, and the data say to ignore"
        ):
            split(Reader(), sample=WORDS, classes=CLASSES, loss=TAKEN, labels=labels)
    with pytest.raises(ModelError, match="this model is made of units already"):
        model_spec(mlp(), loss=ModelLoss())
