"""Losses by name, functions of the user's own, and the loss that a model is given where nobody says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.api.model import model_spec
from edgefl.contract.tensors import TensorSpec
from edgefl.models.exits import with_exits
from edgefl.models.losses import (
    CTC,
    LOSSES,
    CausalLM,
    CrossEntropy,
    Huber,
    Loss,
    ModelLoss,
    OwnLoss,
    Quantile,
    SequenceCrossEntropy,
    SquaredError,
    build,
    own_loss,
)
from edgefl.models.losses.catalog import fit_loss, fitting_losses
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.zoo.basic import mlp
from edgefl.models.zoo.catalog import build_model, with_loss
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.pairs import FORMATS
from tests.parity.forms import checked
from tests.support.errors import ConfigError, ModelError, refuses
from tests.support.gradients import assert_trains_as_torch

NUMBERS = TensorSpec((3,), torch.float32)


def labels(*shape: int, below: int = 5) -> TensorSpec:
    return TensorSpec(shape, torch.int64, below)


@pytest.mark.parametrize("name", LOSSES)
def test_each_name_is_built_with_its_options(name: str) -> None:
    options = {"length": 3} if name == "ctc" else {}
    assert type(build(name, **options)) is LOSSES[name]


def test_a_name_takes_options_as_a_file_has_them() -> None:
    assert build("huber", delta=2.0) == Huber(delta=2.0)
    assert build("quantile", levels=[0.1, 0.9]) == Quantile(levels=(0.1, 0.9))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: build("hubber"),
            ConfigError,
            r"no loss 'hubber'; there are: cross_entropy, .*file.py:function",
        ),
        (
            lambda: build("huber", sigma=1.0),
            ConfigError,
            r"loss 'huber' has no option 'sigma'; it takes delta",
        ),
        (lambda: build("huber", delta="far"), ConfigError, r"option 'delta' of loss 'huber' is 'far'"),
        (lambda: build("ctc"), ConfigError, r"loss 'ctc' needs options: .*'length'"),
        (lambda: build("huber", delta=0.0), ModelError, r"delta of the loss huber is above 0, found 0"),
        (lambda: build("quantile", levels=[1.5]), ModelError, r"lie between 0 and 1.*found \(1.5,\)"),
        (lambda: build("nt_xent", temperature=-1.0), ModelError, r"above 0, found -1"),
        (lambda: CTC(length=0), ModelError, r"texts of 1 symbol at least"),
    ],
)
def test_wrong_names_are_refused(make: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


CHOSEN: list[tuple[TensorSpec, TensorSpec | None, TensorSpec | None, Loss]] = [
    (TensorSpec((5,)), None, None, CrossEntropy()),
    (TensorSpec((5,)), labels(), None, CrossEntropy()),
    (TensorSpec((1,)), labels(below=2), None, CrossEntropy()),
    (TensorSpec((5, 8, 8)), labels(8, 8), None, CrossEntropy()),
    (TensorSpec((5, 8, 8)), TensorSpec((8, 8), torch.int64, 5, 255), None, CrossEntropy(ignore_index=255)),
    (TensorSpec((9, 5)), labels(9), TensorSpec((9, 2)), SequenceCrossEntropy()),
]


@pytest.mark.parametrize(("out", "label", "sample", "loss"), CHOSEN)
def test_the_only_loss_that_fits_is_chosen(
    out: TensorSpec, label: TensorSpec | None, sample: TensorSpec | None, loss: Loss
) -> None:
    assert fit_loss(None, out, label, sample) == loss


UNCLEAR: list[tuple[TensorSpec, TensorSpec | None, str]] = [
    (
        TensorSpec((3,)),
        NUMBERS,
        "name the loss: binary_cross_entropy, squared_error, absolute_error, huber, quantile fit",
    ),
    (TensorSpec((9, 5)), labels(9), "name the loss: sequence_cross_entropy, causal_lm fit"),
    (TensorSpec((9, 5)), labels(4), "ctc"),
    (TensorSpec((2, 8)), labels(), "name the loss: info_nce, nt_xent fit"),
    (TensorSpec((3, 4)), labels(7, 7), "no loss of edgefl fits; a function"),
    (TensorSpec((9, 5)), None, "name the loss: cross_entropy, sequence_cross_entropy, causal_lm"),
]


@pytest.mark.parametrize(("out", "label", "message"), UNCLEAR)
def test_several_fitting_losses_are_listed(out: TensorSpec, label: TensorSpec | None, message: str) -> None:
    if message == "ctc":
        assert fitting_losses(out, label) == ("ctc",)
        return
    with pytest.raises(ModelError, match=message):
        fit_loss(None, out, label)


def test_a_model_without_a_loss_is_split_with_the_one_that_fits() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1))
    sample = TensorSpec((1, 6, 6))
    assert split(net, sample=sample, classes=3, labels=labels(6, 6, below=3)).loss == CrossEntropy()
    with refuses(ModelError, found=(3, 6, 6), losses=...):
        split(net, sample=sample, classes=3)
    with refuses(ModelError, found=(3, 6, 6), classes=7):
        split(net, sample=sample, classes=7, loss=CrossEntropy())


def test_another_loss_is_that_of_every_exit() -> None:
    plain = build_model("mlp", classes=2, hidden=(4, 4))
    assert with_loss(plain, None) is plain
    assert with_loss(plain, SquaredError()).label == TensorSpec((2,), torch.float32)
    exits = with_exits(plain)
    made = with_loss(exits, SquaredError())
    assert type(made) is type(exits) and made.loss.base == SquaredError()  # type: ignore[attr-defined]
    assert made.metrics == ("mae",) and exits.metrics == ("accuracy", "f1")


def relative(out: Tensor, y: Tensor, *, least: float = 1.0) -> Tensor:
    return ((out - y).abs() / y.abs().clamp_min(least)).mean(dim=1)


def mean_of_all(out: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(out, y)


def per_output(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean(dim=0)


def matrix(out: Tensor, y: Tensor) -> Tensor:
    return out - y


def broken(out: Tensor, y: Tensor) -> Tensor:
    return out @ y[:2]


def test_a_mean_is_taken_apart_and_gives_the_same_gradient() -> None:
    out, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    each = own_loss(mean_of_all, NUMBERS).each(out, y)
    torch.testing.assert_close(each, (out - y).abs().mean(1))
    torch.testing.assert_close(
        torch.autograd.grad(each.mean(), out)[0], torch.autograd.grad(mean_of_all(out, y), out)[0]
    )


def listed(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean(dim=1) * out[:, 0].detach().tolist()[0] * 0.0


def by_numpy(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean(dim=1) * float(out.detach().numpy().size)


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (matrix, r"gives \(4, 3\) for 4 samples: expected one number for each, \(4,\), or one for all, \(\)"),
    (per_output, r"gives \(3,\) for 4 samples: expected one number for each"),
    (broken, r"loss 'broken' failed on outputs \(3,\) and labels \(3,\): RuntimeError.*test_loss_choice.py"),
    (listed, "tolist takes values out of a tensor, and a graph would have those of the first batch"),
    (by_numpy, "numpy takes values out of a tensor"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED)
def test_a_function_that_is_no_loss_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        own_loss(function, NUMBERS).label(NUMBERS)


def test_a_function_that_is_not_defined_on_random_outputs_is_taken() -> None:
    """Rates of a Poisson are above 0, and a logarithm of other numbers is NaN."""

    def poisson(out: Tensor, y: Tensor) -> Tensor:
        return (out - y * torch.log(out)).mean(dim=1)

    assert own_loss(poisson, NUMBERS).label(NUMBERS) == NUMBERS


def test_a_function_reads_the_labels_of_the_data_or_says_what_it_needs() -> None:
    with pytest.raises(
        ModelError,
        match=r"'relative' does not say what labels it reads: give `data`, or edgefl.losses.own_loss",
    ):
        fit_loss(OwnLoss(relative), NUMBERS).label(NUMBERS)
    assert fit_loss(OwnLoss(relative), NUMBERS, NUMBERS).label(NUMBERS) == NUMBERS
    said = OwnLoss(relative, NUMBERS)
    assert fit_loss(said, NUMBERS, labels()) is said and own_loss(said) is said


def test_a_file_has_functions_and_classes_of_the_user_s_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from edgefl.models.losses import Huber\n"
        "def relative(out, y, least: float = 1.0): return ((out - y).abs() / y.abs().clamp_min(least)).mean(dim=1)\n"
        "class Mine(Huber): pass\n"
        "class No: pass\n"
    )
    made = build(f"{file}:relative", least=2.0)
    out, y = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(made.each(out, y), relative(out, y, least=2.0))
    assert isinstance(made, OwnLoss) and made.name == "relative"
    assert build(f"{file}:Mine").metrics(NUMBERS) == ("mae",)  # type: ignore[attr-defined]
    with refuses(ConfigError, unknown=["most"], accepted=["least"]):
        build(f"{file}:relative", most=2.0)
    with pytest.raises(ConfigError, match="is a class without the methods each, correct and label"):
        build(f"{file}:No")
    with pytest.raises(ConfigError, match=r"cannot load loss .*has no function 'other'; it defines relative"):
        build(f"{file}:other")


def test_a_causal_model_is_chosen_for_tokens_only() -> None:
    tokens = TensorSpec((9,), torch.int64, 5)
    assert "causal_lm" in fitting_losses(TensorSpec((9, 5)), labels(9), tokens)
    assert fitting_losses(TensorSpec((9, 5)), labels(9), TensorSpec((9, 2))) == ("sequence_cross_entropy",)
    assert isinstance(fit_loss(CausalLM(), TensorSpec((9, 5)), labels(9), tokens), CausalLM)


# -- A model that returns its own loss when it is given labels is trained by that loss ---------------------


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
