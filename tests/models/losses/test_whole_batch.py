"""Losses of the user's own train on the whole batch exactly as torch does, and no other loss is trained in silence."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl import algorithms
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ConfigError, ModelError
from edgefl.models.exits import with_exits
from edgefl.models.losses import OwnLoss, build, own_loss
from edgefl.models.losses.loss import sums_of, training_loss
from edgefl.models.losses.own import draw
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.early_exit.submodel import EarlyExit
from edgefl.submodels.output_side.submodel import OutputSide
from tests.pairs import FORMATS
from tests.parity.forms import runner_of
from tests.support.gradients import assert_trains_as_torch

CLASSES, FEATURES, ROWS = 3, 4, 7
WEIGHT = torch.tensor([1.0, 5.0, 0.2])
CLASS = TensorSpec((), torch.int64, CLASSES)
LOGITS = TensorSpec((CLASSES,))
# Class 0 four times, class 1 once: a mean over samples and one over weights differ.
LABELS = torch.tensor([0, 0, 2, 0, 2, 1, 0])
Function = Callable[[Tensor, Tensor], Tensor]


class Focal(nn.Module):
    """Loss module with a buffer."""

    def __init__(self, gamma: float = 2.0) -> None:
        super().__init__()
        self.gamma = gamma
        self.register_buffer("alpha", torch.tensor([0.2, 0.3, 0.5]))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        entropy = F.cross_entropy(out, y, reduction="none")
        alpha: Tensor = self.get_buffer("alpha")[y]
        return (alpha * (1 - torch.exp(-entropy)) ** self.gamma * entropy).sum() / alpha.sum()


@dataclass
class Scaled:
    """Loss object that Python cannot hash, with a method and weights made at the first call."""

    scale: float = 2.0
    weight: Tensor | None = None

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="sum") * self.scale

    def cached(self, out: Tensor, y: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = torch.tensor([3.0, 1.0, 2.0])
        return F.cross_entropy(out, y, weight=self.weight)


def supervised_contrast(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    same = (y.unsqueeze(0) == y.unsqueeze(1)).float()
    return -(same * torch.log_softmax(z @ z.T / 0.5, dim=1)).sum() / same.sum()


def writes(out: Tensor, y: Tensor) -> Tensor:
    y[y == 0] = -100
    return F.cross_entropy(out.div_(2.0), y)


def dice(out: Tensor, y: Tensor) -> Tensor:
    p, t = out.softmax(dim=1), F.one_hot(y, CLASSES)
    return 1 - (2 * (p * t).sum(dim=0) / (p + t).sum(dim=0)).mean()


TRAINED: dict[str, Function] = {
    "weights made in the function": lambda out, y: F.cross_entropy(
        out, y, weight=torch.tensor([1.0, 5.0, 0.2])
    ),
    "weights of a closure": lambda out, y: F.cross_entropy(out, y, weight=WEIGHT),
    "weights and smoothing": lambda out, y: F.cross_entropy(out, y, weight=WEIGHT, label_smoothing=0.1),
    "partial": partial(F.cross_entropy, weight=WEIGHT),
    "module": nn.CrossEntropyLoss(weight=WEIGHT),
    "nll": lambda out, y: F.nll_loss(F.log_softmax(out, dim=1), y, weight=WEIGHT),
    "ignored class": lambda out, y: F.cross_entropy(out, y, ignore_index=0),
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "focal": Focal(),
    "object": Scaled(),
    "method": Scaled().cached,
    "contrast": supervised_contrast,
    "one-hot": dice,
    "distances": lambda out, y: F.cross_entropy(-torch.cdist(out, torch.eye(CLASSES)), y),
    "deviation over the batch": lambda out, y: F.cross_entropy(out, y) + out.std(dim=0).mean(),
    "per sample": lambda out, y: F.cross_entropy(out, y, reduction="none"),
    "per sample, centred by the batch": lambda out, y: F.cross_entropy(
        out - out.mean(0), y, reduction="none"
    ),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def spec_of(module: nn.Module, loss: Any, labels: TensorSpec | None = CLASS) -> ModelSpec:
    return split(module, sample=TensorSpec((FEATURES,)), classes=CLASSES, loss=loss, labels=labels)


def objective(module: nn.Module, loss: Any, labels: TensorSpec | None = CLASS) -> Objective:
    return Objective.of(OutputSide(spec_of(module, loss, labels), 0))


def inputs() -> Tensor:
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", TRAINED)
def test_a_batch_has_the_loss_and_the_gradient_of_torch(name: str) -> None:
    module, x = network(), inputs()
    spec = spec_of(module, own_loss(TRAINED[name]))

    found, _ = assert_trains_as_torch(
        module, spec, TRAINED[name](module(x), LABELS).mean(), {"x": x, "y": LABELS}
    )

    assert len(found) == len(list(module.parameters()))


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["module", "ignored class", "contrast", "one-hot"])
def test_an_exported_step_moves_the_weights_as_torch_does(form: str, name: str) -> None:
    module, x = network(), inputs()
    tried = objective(module, own_loss(TRAINED[name]))
    step = sgd(tried, batch=ROWS, momentum=0.0, weight_decay=0.0).phases[0].function
    given: Tensors = {f"state.weights.{key}": each.clone() for key, each in tried.suffix.state_dict().items()}
    given |= {"batch.0.x": x, "batch.0.y": LABELS, "hyper.lr": torch.tensor(0.5)}
    found = runner_of(form, step)(given)

    TRAINED[name](module(x), LABELS).backward()
    torch.optim.SGD(module.parameters(), lr=0.5).step()

    for key, parameter in zip(tried.trainable, module.parameters(), strict=True):
        np.testing.assert_allclose(
            found[f"state.weights.{key}"], parameter.detach().numpy(), rtol=1e-5, atol=1e-6
        )


def test_weights_of_ten_thousand_classes_are_a_constant() -> None:
    weight = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) + 0.1
    module = nn.Sequential(nn.Linear(2, 10_000))
    spec = split(
        module, sample=TensorSpec((2,)), classes=10_000, loss=own_loss(nn.CrossEntropyLoss(weight=weight))
    )
    tried = Objective.of(OutputSide(spec, 0))
    step = sgd(tried, batch=4, momentum=0.0).phases[0].function
    given = {f"state.weights.{key}": each.detach() for key, each in tried.suffix.state_dict().items()}
    given |= {"batch.0.x": torch.ones(4, 2), "batch.0.y": torch.tensor([0, 0, 9_999, 5_000])}
    found = runner_of("onnx", step)(given | {"hyper.lr": torch.tensor(0.0)})
    expected = F.cross_entropy(module(given["batch.0.x"]), given["batch.0.y"], weight=weight)
    np.testing.assert_allclose(found["metric.loss"], expected.item(), rtol=1e-5)


def test_positive_weights_and_labels_of_tokens() -> None:
    out, y = torch.randn(4, 5, CLASSES), torch.randint(0, CLASSES, (4, 5))
    y[0, 1:], y[1] = -100, -100
    pairs: list[tuple[Function, Tensor, Tensor]] = [
        (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), out[:, 0], (out[:, 1] > 0).float()),
        (lambda o, t: F.cross_entropy(o.transpose(1, 2), t, weight=WEIGHT), out, y),
        (lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()), out, y),
    ]
    for function, logits, labels in pairs:
        loss = own_loss(function, TensorSpec(labels.shape[1:], labels.dtype, CLASSES, -100))
        assert loss.label(TensorSpec(logits.shape[1:])).shape == labels.shape[1:]
        torch.testing.assert_close(training_loss(loss, logits, labels), function(logits, labels))
        alone = [function(logits[i : i + 1], labels[i : i + 1]).nan_to_num() for i in range(4)]
        torch.testing.assert_close(loss.each(logits, labels), torch.stack(alone))


def test_evaluation_averages_samples_and_omits_padding_rows() -> None:
    loss = own_loss(TRAINED["ignored class"], CLASS)
    out = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(2))
    y, mask = torch.tensor([1, 0, 2, 0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    found = sums_of(loss, out, y, mask)
    expected = F.cross_entropy(out[[0, 2]], y[[0, 2]], reduction="sum")
    torch.testing.assert_close(found["loss_sum"], expected)
    assert found["count"] == 3.0
    # A model that diverged is not a sample without labels.
    assert loss.each(torch.full((1, CLASSES), torch.nan), torch.tensor([1])).isnan().all()


def test_evaluation_of_a_function_that_vmap_cannot_run() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: Tensor) -> Tensor:
            return 2 * out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return 2 * grads[0]

    def function(out: Tensor, y: Tensor) -> Tensor:
        scaled: Tensor = Twice.apply(out)  # type: ignore[no-untyped-call]
        return F.cross_entropy(scaled, y)

    loss, out = own_loss(function, CLASS), torch.randn(ROWS, CLASSES)
    assert loss.label(LOGITS) == CLASS
    torch.testing.assert_close(loss.each(out, LABELS), F.cross_entropy(2 * out, LABELS, reduction="none"))


def test_a_function_that_writes_into_its_labels_is_evaluated_on_copies() -> None:
    loss, out, y = own_loss(writes, CLASS), torch.randn(ROWS, CLASSES), LABELS.clone()
    expected = F.cross_entropy(out / 2, y, reduction="none") * (y != 0)
    assert loss.label(LOGITS) == CLASS
    torch.testing.assert_close(loss.each(out.clone(), y), expected)
    assert torch.equal(y, LABELS)


class Warming:
    """Loss object that counts its calls."""

    def __init__(self) -> None:
        self.t = 0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        self.t += 1
        return F.cross_entropy(out, y) * min(1.0, self.t / 10)


class Moving(nn.Module):
    """Loss module whose buffer moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss, mean = F.cross_entropy(out, y), self.get_buffer("mean")
        mean.mul_(0.9).add_(loss.detach())
        return loss / mean


class Centres(nn.Module):
    """Loss module with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.ones(CLASSES, CLASSES))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return (out - self.centres[y]).square().mean()


SETTINGS = SimpleNamespace(step=0)


def counting_in_a_namespace(out: Tensor, y: Tensor) -> Tensor:
    SETTINGS.step += 1
    return F.cross_entropy(out, y)


class CountingInItsClass:
    t = 0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        CountingInItsClass.t += 1
        return F.cross_entropy(out, y)


REFUSED: dict[str, tuple[Function, str]] = {
    "counter": (Warming(), "loss 'Warming' changes t each time it runs"),
    "counter of a method": (Warming().__call__, "changes self.t each time it runs"),
    "global": (counting_in_a_namespace, r"changes SETTINGS\.step each time it runs"),
    "class": (CountingInItsClass(), r"changes CountingInItsClass\.t each time it runs"),
    "buffer": (Moving(), "loss 'Moving' changes mean each time it runs"),
    "parameters": (
        Centres(),
        r"'Centres' reads a parameter of shape \(3, 3\).*register it as a buffer.*test_whole_batch",
    ),
    "noise": (
        lambda out, y: F.cross_entropy(out + torch.randn_like(out), y),
        "draws random numbers.*test_whole_batch",
    ),
    "dropout": (lambda out, y: F.cross_entropy(F.dropout(out), y), "draws random numbers"),
    "random": (
        lambda out, y: F.cross_entropy(out, y) * random.random(),
        "another value when it is called again",
    ),
    "accuracy": (lambda out, y: (out.argmax(dim=1) == y).float().mean(), "has no gradient"),
    "too few weights": (partial(F.cross_entropy, weight=torch.ones(2)), "failed on outputs.*weight tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_no_graph_can_hold_is_refused_by_name(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        own_loss(function, CLASS).label(LOGITS)
    assert (SETTINGS.step, CountingInItsClass.t) == (0, 0)


@pytest.mark.parametrize("name", TRAINED)
def test_the_gradient_of_all_data_needs_a_loss_per_sample(name: str) -> None:
    tried = objective(network(), own_loss(TRAINED[name]))
    if name == "per sample":
        assert algorithms.build("mimelite", tried, batch=4).exchanges
        return
    with pytest.raises(
        ModelError, match=r"\(mimeadam, mimelite\) needs the loss of each sample, and the loss"
    ):
        algorithms.build("mimelite", tried, batch=4)


def test_exits_are_trained_by_the_loss_of_the_whole_batch() -> None:
    spec = spec_of(network(), own_loss(TRAINED["module"]))
    branched = with_exits(spec, after=spec.units[:1])
    tried = Objective.of(EarlyExit(branched, 2))
    x, weights = inputs(), dict(tried.suffix.state_dict())
    found = gradient(tried, weights, {"batch.0.x": x, "batch.0.y": LABELS})[0]
    outputs = torch.func.functional_call(tried.suffix.train(), weights, (x,))
    first, last = (F.cross_entropy(outputs[:, exit], LABELS, weight=WEIGHT) for exit in range(2))
    torch.testing.assert_close(found, (first + 2 * last) / 3)


def test_trial_labels_have_all_classes_unequally_and_ignored_ones() -> None:
    for labels in (CLASS, TensorSpec((5,), torch.int64, 10, -100)):
        out, y = draw(LOGITS, labels)
        counts = torch.bincount(y[y >= 0], minlength=labels.below or 0)
        assert len(out) == len(y) and len(out) not in (3, 5)
        assert (counts > 0).all() and counts.unique().numel() > 1
        assert bool((y == -100).any()) == (labels.ignored is not None)


def test_loss_modules_of_torch_know_their_labels() -> None:
    assert objective(network(), own_loss(nn.CrossEntropyLoss()), None).labels(2) == CLASS.rows(2)
    assert objective(network(), own_loss(nn.BCEWithLogitsLoss()), None).labels(2) == LOGITS.rows(2)
    places = own_loss(nn.CrossEntropyLoss(ignore_index=255))
    assert isinstance(places, OwnLoss)
    pixels = TensorSpec((2, 2), torch.int64, CLASSES, 255)
    assert places.with_labels(None, TensorSpec((CLASSES, 2, 2))).labels == pixels


def test_a_loss_module_is_an_argument_and_a_name(tmp_path: Path) -> None:
    bundle = edgefl.compile(
        edgefl.Model(network(), sample=(FEATURES,), classes=CLASSES),
        training=edgefl.Training(loss=nn.CrossEntropyLoss(weight=WEIGHT)),
    )
    assert bundle is not None
    with pytest.raises(ConfigError, match=r"a class that needs arguments.*give an instance"):
        edgefl.compile(
            edgefl.Model(network(), sample=(FEATURES,), classes=CLASSES),
            training=edgefl.Training(loss=partial_class()),
        )
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from torch import nn\n"
        "weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2]))\n"
        "class Scaled(nn.CrossEntropyLoss):\n"
        "    def __init__(self, scale: float = 1.0):\n"
        "        super().__init__()\n"
        "        self.scale = scale\n"
        "    def forward(self, out, y): return self.scale * super().forward(out, y)\n"
    )
    out = torch.randn(ROWS, CLASSES)
    expected = {
        "weighted": F.cross_entropy(out, LABELS, weight=WEIGHT),
        "Scaled": F.cross_entropy(out, LABELS),
    }
    for name, value in expected.items():
        torch.testing.assert_close(training_loss(build(f"{file}:{name}"), out, LABELS), value)
    scaled = build(f"{file}:Scaled", scale=3.0)
    torch.testing.assert_close(training_loss(scaled, out, LABELS), 3 * expected["Scaled"])


def partial_class() -> type:
    class Needs(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()

    return Needs
