"""The comparison with torch: what agrees, what is refused by name, and faults that are planted into our side."""

from __future__ import annotations

import copy
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl.comparison import torch_side
from edgefl.comparison.compare import compare
from edgefl.comparison.key import key_of
from edgefl.contract.tensors import TensorSpec
from edgefl.models.losses.own import OwnLoss
from edgefl.models.split import split
from edgefl.models.torch_functions import random_inputs
from edgefl.models.torch_functions.random_ops import RULES, Draw, drop_entries
from tests.support.errors import ModelError, refuses

SAMPLE = TensorSpec((4,))


class Net(nn.Module):
    """Two dense layers; subclasses add what people do between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(torch.tanh(self.first(x))))
        return out


class Frozen(Net):
    """A part in inference mode that would draw in training."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
        self.part.eval().requires_grad_(False)

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.part(h)
        return out


class Distilled(Net):
    """A frozen teacher in front of the student: the student's units read the sample again."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            soft: Tensor = self.teacher(x).softmax(dim=-1)
        return super().forward(x) + soft


class Vectorised(Net):
    """An ensemble of heads by torch.vmap, which no cut may part."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(2, 6, 6))

    def between(self, h: Tensor) -> Tensor:
        heads: Tensor = torch.vmap(lambda weight: F.linear(h, weight))(self.heads)
        return heads.mean(0)


class Scheduled(Net):
    """A Python counter decides what is computed, ``late`` after many steps."""

    def __init__(self, late: int = 2) -> None:
        super().__init__()
        self.step, self.late = 0, late

    def between(self, h: Tensor) -> Tensor:
        self.step += 1
        return h if self.step < self.late else 2 * h


class Filling(Net):
    """Holds a number that differs from itself, and a parameter without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.fill, self.nothing = float("nan"), nn.Parameter(torch.empty(0))

    def between(self, h: Tensor) -> Tensor:
        torch.empty(0).fill_(1.0)
        return torch.nan_to_num(h.masked_fill(h > 0.5, self.fill), 0.5)


class Logging(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[int]()

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return h


class Warming(Net):
    """An integer buffer that forward moves and reads."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return h * torch.clamp(self.steps / 10, max=1.0)


class Clipped(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.clamp_(-0.1, 0.1)
        return h


class Toggled(Net):
    def between(self, h: Tensor) -> Tensor:
        self.first.requires_grad_(False)
        return h


def hooked() -> nn.Module:
    module = Net()
    module.first.register_forward_hook(lambda _module, _args, out: 3 * out)
    module.second.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return module


def turning() -> nn.Module:
    module = Net()
    module.second.register_full_backward_hook(
        lambda _module, gradients, _outer: tuple(map(torch.neg, gradients))
    )
    return module


def averaging() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "layer", [nn.LSTM, nn.GRU, nn.RNN, lambda *sizes, **how: nn.RNN(*sizes, **how, nonlinearity="relu")]
)
def test_stacked_recurrent_layers_drop_the_same(layer: Callable[..., nn.Module]) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(3, 4, 2, batch_first=True, dropout=0.3, bidirectional=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.layer(x)[0][:, -1])
            return out

    spec = split(seeded(Reading), sample=TensorSpec((5, 3)), classes=3)

    assert compare(spec).units == spec.units


def renormed() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Flatten(), nn.Linear(32, 3))


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [Net, Frozen, Distilled, Vectorised, hooked, Logging, Filling, Warming])
def test_compared_agrees(make: Callable[[], nn.Module]) -> None:
    spec = split(seeded(make), sample=SAMPLE, classes=3)

    assert compare(spec).units == spec.units


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Scheduled, r"'step' changes from call to call|a Python value that is kept"),
        (lambda: Scheduled(late=1000), r"keeps Python state: 'step' .*register_buffer"),
        (Clipped, r"writes the parameter 'second\.weight' in forward \(at .*test_compare\.py:\d+\)"),
        (Toggled, r"switches requires_grad of 'first\.weight' in forward \(at .*:\d+\); .*detach\(\)"),
        (turning, r"backward hook of 'second' returns a gradient; .*register_hook"),
        (averaging, r"momentum=None.*such as 0\.1"),
        (
            lambda: Net().double(),
            r"'first\.weight' is torch\.float64, expected torch\.float32: call float\(\)",
        ),
        (renormed, r"writes the parameter '0\.weight' in forward .*Leave max_norm out"),
        (lambda: torch.jit.script(Net()), r"found a scripted one"),
    ],
)
def test_compared_refuses(make: Callable[[], nn.Module], message: str) -> None:
    sample = TensorSpec((8,), torch.int64, below=10) if make is renormed else SAMPLE
    with pytest.raises(ModelError, match=message):
        compare(split(seeded(make), sample=sample, classes=3))


def weighted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, weight=torch.tensor([1.0, 5.0, 0.2]))


def _all_train(module: nn.Module, *, training: bool) -> None:
    module.train(training)


def _unweighted(_loss: OwnLoss, out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def stopped() -> nn.Module:
    """A module with a weight that a hook on its gradient keeps as it is."""
    module = Net()
    module.second.weight.register_hook(lambda slope: 0.0 * slope)
    return module


def _no_hook(tensor: Tensor, _hooks: object) -> Tensor:
    return tensor


FAULTS: dict[str, tuple[Callable[[], nn.Module], str, Any, dict[str, Any], str]] = {
    "mode": (
        Frozen,
        "edgefl.models.spec.set_mode",
        _all_train,
        {},
        r"begins in .* 'part.*other random numbers",
    ),
    "hook": (
        hooked,
        "edgefl.objective.objective.apply_gradient_hooks",
        _no_hook,
        {},
        r"'second\.weight' differs.* begins in the gradient of submodule 'second'",
    ),
    "size": (
        stopped,
        "edgefl.objective.objective.apply_gradient_hooks",
        _no_hook,
        {},
        r"'second\.weight' stays as it is in torch alone, not on devices\. The difference begins",
    ),
    "loss": (
        Net,
        "edgefl.models.losses.own.OwnLoss.batch_loss",
        _unweighted,
        {"loss": OwnLoss(weighted, TensorSpec((), torch.int64, 3))},
        r"the loss differs.*one loss per sample",
    ),
    "baked": (lambda: Scheduled(late=1000), "edgefl.comparison.compare.check_state", lambda *_: None, {}, ""),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    make, place, ours, options, message = FAULTS[fault]
    monkeypatch.setenv("EDGEFL_CACHE", str(tmp_path))
    if fault != "baked":  # it is the check itself that is patched out
        monkeypatch.setattr(place, ours)
        with pytest.raises(ModelError, match=message):
            compare(split(seeded(make), sample=SAMPLE, classes=3, **options))
    else:
        with refuses(ModelError, attribute="step", refused=True):
            compare(split(seeded(make), sample=SAMPLE, classes=3))
        monkeypatch.setattr(place, ours)
    monkeypatch.setattr("edgefl.api.model.compare", lambda spec, *_: spec)
    bundle = edgefl.compile(
        edgefl.Model(seeded(make), sample=(4,), classes=3),
        training=edgefl.Training(algorithm=edgefl.algorithms.SGD(batch=2, steps=1), loss=options.get("loss")),
    )

    assert bundle.verify().ok


def _seldom(draw: Draw, input: Tensor, p: float, train: bool) -> Tensor:
    """Dropout that draws a number for each row alone."""
    return drop_entries(draw, input, p) if not train else input * (draw((len(input), 1)) >= p) / (1 - p)


def test_a_draw_of_one_side_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3)))
    right, call = RULES, random_inputs.call_with_draws

    def torch_draws(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(random_inputs, "RULES", right)
            return call(*arguments)

    monkeypatch.setattr(random_inputs, "RULES", {**right, "dropout": _seldom})
    monkeypatch.setattr("edgefl.comparison.random_draws.call_with_draws", torch_draws)
    with pytest.raises(
        ModelError, match=r"begins in the output of submodule '1' \(Dropout\).*random numbers"
    ):
        compare(split(module, sample=SAMPLE, classes=3))


class Busy(Warming):
    """Changes about everything that a forward pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.log: list[float] = []
        self.last = 0

    def between(self, h: Tensor) -> Tensor:
        self.last += 1
        self.log.append(self.last)
        out: Tensor = self.drop(self.norm(super().between(h)))
        return out


def test_the_users_object_is_as_it_was() -> None:
    module = seeded(Busy)
    module.norm.eval()
    module.first.weight.grad = torch.ones_like(module.first.weight)
    before = copy.deepcopy(module.state_dict())
    modes = [part.training for part in module.modules()]
    identities = [id(each) for each in (*module.parameters(), *module.buffers())]
    torch.manual_seed(5)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())

    compare(split(module, sample=SAMPLE, classes=3))

    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [part.training for part in module.modules()] == modes
    assert [id(each) for each in (*module.parameters(), *module.buffers())] == identities
    assert torch.equal(module.first.weight.grad, torch.ones_like(module.first.weight))
    assert (module.log, module.last, module.second.weight.grad) == ([], 0, None)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]


def test_a_result_is_remembered_until_the_object_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    train = torch_side.train

    def counting(*args: Any, **kwargs: Any) -> torch_side.TrainingResult:
        trained.append(1)
        return train(*args, **kwargs)

    monkeypatch.setattr(torch_side, "train", counting)
    module = seeded(Frozen)
    for _ in range(2):
        compare(split(module, sample=SAMPLE, classes=3))
    assert len(trained) == 1
    module.part.train()
    compare(split(module, sample=SAMPLE, classes=3))
    assert len(trained) == 2


def test_the_key_of_a_remembered_result_holds_no_copy_of_an_array() -> None:
    module = seeded(Net)
    module.table = table = np.zeros(1 << 20)
    spec = split(module, sample=SAMPLE, classes=3)
    assert spec.source is not None

    tracemalloc.start()
    before = key_of(spec, spec.source, None)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < table.nbytes / 8
    assert key_of(spec, spec.source, None) == before
    table[7] = 1.0
    assert key_of(spec, spec.source, None) != before


def test_check_says_what_the_comparison_says() -> None:
    verdict = edgefl.check(edgefl.Model(seeded(Clipped), sample=(4,), classes=3), engines=["onnx"])

    assert not verdict.ok
    assert "writes the parameter 'second.weight'" in str(verdict)
