"""Buffers that forward binds anew, writes by ``.data``, or makes larger."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from edgefl.comparison.compare import compare
from edgefl.comparison.torch_side import restored
from edgefl.errors import EdgeflError, ModelError
from edgefl.models.split import split
from tests.comparison.test_compare import SAMPLE, Net, seeded


class Counter(nn.Module):
    """A counter that is bound anew, and an index."""

    steps: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rows", torch.rand(3, 6))

    def forward(self, h: Tensor) -> Tensor:
        self.steps = torch.add(self.steps, 1)
        return h * self.rows[self.steps % 3]


class Rebinding(Net):
    """A flag, a counter and a running mean that are bound anew, here and in a part."""

    seen: Tensor
    steps: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.part = Counter()

    def between(self, h: Tensor) -> Tensor:
        new = h.detach().mean(0)
        setattr(self, "steps", self.steps + 1)  # noqa: B010
        self.mean = torch.where(self.seen, self.mean + (new - self.mean) / self.steps, new)
        self.seen = torch.ones_like(self.seen)
        out: Tensor = self.part(h - self.mean)
        return torch.dropout(out, 0.5, self.training)


class Holding(Net):
    """Buffers of several forms that ``change`` may write."""

    kept: Tensor
    other: Tensor
    number: Tensor
    expanded: Tensor
    inferred: Tensor

    def __init__(self, change: Callable[[Holding, Tensor], object], *shape: int) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("kept", torch.zeros(shape))
        self.register_buffer("other", torch.zeros(shape), persistent=False)
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))
        self.register_buffer("expanded", torch.ones(1).expand(6))
        with torch.inference_mode():
            self.register_buffer("inferred", torch.ones(6))

    def between(self, h: Tensor) -> Tensor:
        self.change(self, h.detach())
        h = (h + self.inferred) * torch.clamp(self.number / 10, max=1.0) * self.expanded
        return h + self.kept.mean() + self.other.mean()


def _data(net: Holding, h: Tensor) -> None:
    net.kept.data = torch.cat((net.kept, h))[-4:]
    net.other.data = 0.9 * net.other.data + 0.1 * h.mean(0)
    net.number.data += 1


def _set(net: Holding, h: Tensor) -> None:
    Tensor.set_(net.kept, torch.cat((net.kept, h))[-4:])  # type: ignore[call-overload]
    net.other.resize_(4, 6).copy_(h.mean(0))
    net.number.data = net.number.data + 1


@pytest.mark.parametrize(
    "make", [Rebinding, lambda: Holding(_data, 4, 6), lambda: Holding(_set, 4, 6)], ids=["=", "data", "set_"]
)
def test_written_buffers_train_as_in_torch(make: Callable[[], nn.Module]) -> None:
    compare(split(seeded(make), sample=SAMPLE, classes=3))


def _grown(name: str) -> Callable[[Holding, Tensor], object]:
    return lambda net, h: setattr(net, name, torch.cat((getattr(net, name), h))[-4:])


def _grown_data(net: Holding, h: Tensor) -> None:
    net.other.data = torch.cat((net.other, h))[-4:]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_grown("kept"), "kept"),
        (_grown("other"), "other"),
        (_grown_data, "other"),
        (lambda net, h: net.kept.resize_(h.shape).copy_(h), "kept"),
        (lambda net, _h: net.other.unsqueeze_(0), "other"),
        (lambda net, h: net.other.set_(h.clone()), "other"),
        (lambda net, h: net.kept.data.resize_(h.shape), "kept"),
    ],
)
def test_buffers_of_another_shape_are_refused(change: Callable[[Holding, Tensor], object], name: str) -> None:
    module = seeded(lambda: Holding(change, 1, 6))

    with pytest.raises(ModelError, match=f"buffer '{name}' changes its shape in forward: expected .1, 6."):
        compare(split(module, sample=SAMPLE, classes=3))

    assert module.kept.shape == module.other.shape == (1, 6)


def test_restored_gives_a_buffer_its_memory_and_shape() -> None:
    module = Holding(_set, 4, 6)
    before = {name: each.clone() for name, each in module.named_buffers()}
    place = module.other.data_ptr()

    with restored(module):
        module.kept.resize_(9, 6).fill_(1.0)
        module.other.set_(torch.ones(3).untyped_storage())
        module.number.data = torch.ones(2)

    assert all(torch.equal(each, before[name]) for name, each in module.named_buffers())
    assert module.other.data_ptr() == place


def _lazy(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    class Lazy(Net):
        """Makes a part in its first call."""

        part: nn.Module

        def between(self, h: Tensor) -> Tensor:
            if not hasattr(self, "part"):
                self.part = make()
            out: Tensor = self.part(h)
            return out

    return lambda: nn.Sequential(Lazy())


class Teacher(Net):
    """Moves the weights of a copy that no attribute registers."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [nn.Linear(4, 6).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher[0].weight.mul_(0.9).add_(self.first.weight, alpha=0.1)
        out: Tensor = super().forward(x) + self.teacher[0](x)[:, :3]
        return out


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_lazy(lambda: nn.Linear(6, 6)), r"makes the parameter '(0\.)?part.weight' in forward; expected all"),
        (Teacher, r"a write to a tensor that the module does not know.*test_buffers\.py.*register_buffer"),
    ],
)
def test_what_no_module_registers_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(EdgeflError, match=message):
        compare(split(seeded(make), sample=SAMPLE, classes=3))
