"""Python state, modes and inference: what torch's side shows of them, and when a result is forgotten."""

from __future__ import annotations

import ctypes
import gc
import io
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.comparison import torch_side
from edgefl.comparison.compare import compare
from edgefl.comparison.outside import noting_outside
from edgefl.contract.tensors import TensorSpec
from edgefl.models.losses.own import OwnLoss
from edgefl.models.split import split
from tests.comparison.test_compare import SAMPLE, Net, seeded
from tests.support.errors import ModelError, refuses
from tests.support.states import stateful


class Merging(Net):
    """Adds a product of low rank to a weight, or merges it into the weight in inference, as LoRA layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))
        self.weight, self.merged = nn.Parameter(torch.randn(6, 6)), False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.merged == mode:
            change = self.high @ self.low
            self.weight.data += -change if mode else change
            self.merged = not mode
        return self

    def between(self, h: Tensor) -> Tensor:
        h, low = F.linear(h, self.weight), F.linear(F.linear(h, self.low), self.high)
        return h if self.merged else h + low


class Centred(Net):
    """Keeps a mean of training outside of its buffers, for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(6)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0)
            return h
        return h - self.mean


class Locked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Stubborn(Net):
    def train(self, mode: bool = True) -> Stubborn:
        raise RuntimeError("set once")


class Equal(Net):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = None  # type: ignore[assignment]


class Windowed(Net):
    """A Python counter decides what is computed, in some steps of a long training only."""

    step = 0

    def between(self, h: Tensor) -> Tensor:
        self.step += 1
        return 2 * h if 50 < self.step < 500 else h


class Banking(Net):
    """Keeps what it computed in a list, and reads that once there is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = list[Tensor]()

    def between(self, h: Tensor) -> Tensor:
        self.bank.append(h.detach().mean(0))
        return h + self.bank[0] if len(self.bank) > 8 else h


class Configured(Net):
    """Reads a dictionary and a function that people may change; ``late`` adds what the first call computed."""

    def __init__(self) -> None:
        super().__init__()
        self.how, self.seen = {"late": False}, list[Tensor]()
        self.act: Callable[[Tensor], Tensor] = torch.relu

    def between(self, h: Tensor) -> Tensor:
        return self.late(h) if self.how["late"] else self.act(h)

    def late(self, h: Tensor) -> Tensor:
        self.seen.append(h.detach().mean(0))
        return h + self.seen[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Locked, r"expected a module that deepcopy .*_thread\.lock"),
        (Stubborn, r"train\(\) accept.*set once \(at .*test_state\.py:\d+\)"),
        (Equal, r"cannot list the parts of Equal.*unhashable"),
        (Windowed, r"keeps Python state: 'step'"),
        (Banking, r"keeps Python state"),
        (Merging, r"another output in inference.*merge weights in forward"),
        (Centred, r"another output in inference.*register_buffer"),
    ],
)
def test_modules_that_go_wrong_later_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        compare(split(seeded(make), sample=SAMPLE, classes=3))


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(24))
def test_state_may_be_logged_and_may_not_decide(seed: int) -> None:
    form, module, decides = stateful(seed)
    before = str(vars(module)), str(vars(module.box)), str(vars(type(module)).get("held"))

    with pytest.raises(ModelError, match=r"keeps Python state: '[\w.]*held") if decides else nullcontext():
        compare(split(module, sample=SAMPLE, classes=3))

    assert (str(vars(module)), str(vars(module.box)), str(vars(type(module)).get("held"))) == before, form


class Holding(Net):
    """Counts its calls in ``holder``; ``count`` adds one and returns the number."""

    def __init__(self, count: Callable[[], int], late: int) -> None:
        super().__init__()
        self.count, self.late = count, late

    def between(self, h: Tensor) -> Tensor:
        return h if self.count() < self.late else 2 * h


def in_text() -> Callable[[], int]:
    holder = io.StringIO()

    def count() -> int:
        holder.write("x")
        return holder.tell()

    return count


def in_c() -> Callable[[], int]:
    holder = ctypes.c_int(0)

    def count() -> int:
        holder.value += 1
        return holder.value

    return count


def in_shared_memory() -> Callable[[], int]:
    holder = multiprocessing.Value("i", 0)

    def count() -> int:
        with holder.get_lock():
            holder.value += 1
        return holder.value

    return count


def in_context() -> Callable[[], int]:
    holder = ContextVar("holder", default=0)

    def count() -> int:
        holder.set(holder.get() + 1)
        return holder.get()

    return count


def in_environment() -> Callable[[], int]:
    def count() -> int:
        os.environ["HOLDER"] = f"{os.environ.get('HOLDER', '')}x"
        return len(os.environ["HOLDER"])

    return count


def in_file() -> Callable[[], int]:
    folder = tempfile.TemporaryDirectory()

    def count() -> int:
        with open(f"{folder.name}/holder", "a") as file:
            file.write("x")
            return file.tell()

    return count


def in_semaphore() -> Callable[[], int]:
    holder = threading.BoundedSemaphore(9)
    return lambda: 0 if holder.acquire(blocking=False) else 99


def in_bound_method() -> Callable[[], int]:
    holder = list[None]()
    append, length = holder.append, holder.__len__

    def count() -> int:
        append(None)
        return length()

    return count


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (in_text, "something outside, read or written by 'StringIO"),
        (in_c, "'holder'"),
        (in_shared_memory, "'holder._obj'"),
        (in_context, "'holder'"),
        (in_environment, "something outside, read or written by 'putenv"),
        (in_file, "something outside, read or written by 'open"),
        (in_semaphore, "'holder._value'"),
        (in_bound_method, "'append.self'"),
    ],
)
def test_objects_of_c_and_of_the_system_may_count_and_may_not_decide(
    holder: Callable[[], Callable[[], int]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDER", "")
    with pytest.raises(ModelError, match=f"keeps Python state: {name}"):
        compare(split(seeded(lambda: Holding(holder(), 9)), sample=SAMPLE, classes=3))
    if holder is not in_semaphore:
        compare(split(seeded(lambda: Holding(holder(), 1_000_000_000)), sample=SAMPLE, classes=3))


class Hidden(Net):
    """Keeps tensors and modules in plain containers, and logs from hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.moved = list[int](), torch.zeros(2)
        self.teachers: list[Any] = [nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6))]
        self.second.register_full_backward_hook(lambda *_: self.seen.append(1))
        self.first.weight.register_hook(lambda _: self.seen.append(2))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.moved += 1
            for each in self.teachers[0][1].parameters():
                each.mul_(0.5)
        self.teachers[0](h.detach()).sum().backward()
        return h


def test_torch_leaves_everything_that_it_reaches_as_it_was() -> None:
    module = seeded(Hidden)
    teacher = module.teachers[0]
    before = {name: each.clone() for name, each in teacher.state_dict().items()}
    batch = {"x": torch.randn(6, 4), "y": torch.arange(6) % 3}
    spec = split(seeded(Net), sample=SAMPLE, classes=3)
    assert spec.source is not None

    trained = torch_side.train(replace(spec.source, module=module), spec.loss, [batch, batch], 0)

    assert len(trained.losses) == 2
    assert (module.seen, module.moved.tolist(), teacher[1].weight.grad) == ([], [0.0, 0.0], None)
    for name, each in teacher.state_dict().items():
        torch.testing.assert_close(each, before[name], rtol=0, atol=0)


class Weighted(Net):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, weight=torch.arange(1.0, 4.0))


class Staged(Net):
    """Changes a member of an enumeration, and holds a tensor that decides late."""

    stage, step = HTTPStatus.OK, torch.tensor(0)

    def between(self, h: Tensor) -> Tensor:
        self.stage = HTTPStatus.CREATED
        return h


class Late(Staged):
    def between(self, h: Tensor) -> Tensor:
        self.step = self.step + 1
        return torch.where(self.step > 200, 2 * h, h)


def test_a_member_of_an_enumeration_may_change_and_a_tensor_may_not() -> None:
    compare(split(seeded(Staged), sample=SAMPLE, classes=3))
    with refuses(ModelError, attribute="step", refused=True):
        compare(split(seeded(Late), sample=SAMPLE, classes=3))


@pytest.mark.sample(1)
@pytest.mark.parametrize("changed", ["how", "act", "between"])
def test_a_result_is_not_used_after_a_change(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = seeded(Configured)
    compare(split(module, sample=SAMPLE, classes=3))
    if changed == "how":
        module.how["late"] = True
    elif changed == "act":
        module.act = module.late
    else:
        monkeypatch.setattr(Configured, "between", Configured.late)

    with pytest.raises(ModelError):
        compare(split(module, sample=SAMPLE, classes=3))


def test_nothing_holds_a_module_that_was_compared_with_a_loss_of_its_own() -> None:
    module = seeded(Weighted)
    alive = ref(module)
    for _ in range(2):  # a bound method is another object each time
        compare(
            split(module, sample=SAMPLE, classes=3, loss=OwnLoss(module.loss, TensorSpec((), torch.int64, 3)))
        )
    del module
    gc.collect()

    assert alive() is None


def test_callbacks_of_the_garbage_collector_are_not_the_modules() -> None:
    """Hypothesis and others register one that reads the clock; it may run inside of any call."""
    found: list[str] = []
    gc.callbacks.append(lambda phase, info: time.perf_counter())
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with noting_outside(found):
            garbage = [[[]] for _ in range(1_000)]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.pop()
    assert len(garbage) == 1_000 and found == [] and gc.isenabled()
