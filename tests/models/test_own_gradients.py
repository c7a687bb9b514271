"""A ``torch.autograd.Function`` in a model's code keeps its gradient, wherever a cut lies and in either form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import edgefl
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.split import split
from edgefl.models.torch_functions.autograd_functions import differentiable
from tests.support.gradients import assert_trains_as_torch

SAMPLE = TensorSpec((6,))


class Reversed(torch.autograd.Function):
    """Of the newer form, its output its input."""

    @staticmethod
    def forward(x: Tensor, by: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.by * grad, None


class Rounded(torch.autograd.Function):
    """Of the older form, with something saved that it neither reads nor returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.sigmoid())
        ctx.by = 2.0
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (soft,) = ctx.saved_tensors
        return grad * soft * ctx.by


class Net(nn.Module):
    """Three layers, with ``bent`` applied to the first one's output."""

    def __init__(self, bent: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.bent = bent

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        h = self.bent(self, h) + h / 8
        return self.c(torch.relu(self.b(h)) + h)


def both_forms(_net: Net, x: Tensor) -> Tensor:
    return Rounded.apply(Reversed.apply(x, by=0.25))


def checkpointed(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda t: torch.relu(net.b(t)), x, use_reentrant=True)


def hooked(_net: Net, x: Tensor) -> Tensor:
    x.register_hook(torch.neg)
    return x


def hooked_if_it_learns(_net: Net, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(torch.neg)
    return x


def hooked_later(net: Net, x: Tensor) -> Tensor:
    """What a guard sees is made by operations, not by a layer; and a tuple holds it."""
    first, _second = (x / 2).chunk(2, dim=-1)
    if net.training and first.requires_grad and torch.is_grad_enabled():
        first.register_hook(torch.neg)
    return torch.cat((first, first), dim=-1)


def hooked_nowhere(net: Net, x: Tensor) -> Tensor:
    """What is cut off from the weights requires no gradient."""
    with torch.no_grad():
        y = net.b(x)
    for each in (x.detach(), x.data, y):
        hooked_if_it_learns(net, each)
    return x


class HookedInput(Net):
    """The samples require no gradient either."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(hooked_if_it_learns(self, x))


class Twisted(nn.Linear):
    """A layer that no cut opens may have a hook."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: 3 * grad)
        return y


class HookedInside(Net):
    def __init__(self) -> None:
        super().__init__(lambda _net, x: x)
        self.b = Twisted(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


NETS: dict[str, tuple[Callable[[], Net], tuple[str, ...] | None]] = {
    "newer form": (lambda: Net(lambda _net, x: Reversed.apply(x, 0.5)), None),
    "older form": (lambda: Net(lambda _net, x: Rounded.apply(Rounded.apply(x))), None),
    "both": (lambda: Net(both_forms), None),
    "checkpointed": (lambda: Net(checkpointed), None),
    "hooked nowhere": (lambda: HookedInput(hooked_nowhere), None),
    "hooked inside of a leaf": (HookedInside, ("a", "b")),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NETS)
def test_the_gradient_of_the_units_is_that_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    make, cuts = NETS[name]
    module = make()
    spec = split(module, cuts, sample=SAMPLE, classes=3)
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])

    found, _ = assert_trains_as_torch(module, spec, F.cross_entropy(module(x), y), {"x": x, "y": y})

    assert len(spec.units) == 3 and len(found) == len(list(module.parameters()))


@pytest.mark.sample(1)
@pytest.mark.parametrize("bent", [hooked, hooked_if_it_learns, hooked_later])
def test_a_hook_on_a_tensor_keeps_a_model_whole(bent: Callable[[Net, Tensor], Tensor]) -> None:
    assert split(Net(bent), sample=SAMPLE, classes=3).units == ("model",)
    with pytest.raises(ModelError, match=r"register_hook.*test_own_gradients\.py:\d+"):
        split(Net(bent), ["a"], sample=SAMPLE, classes=3)


def test_both_forms_are_exported_and_agree_with_torch() -> None:
    bundle = edgefl.compile(
        edgefl.Model(Net(both_forms), sample=SAMPLE, classes=3),
        training=edgefl.Training(algorithm=edgefl.algorithms.SGD(batch=4)),
    )

    assert bundle.verify()


def test_functions_are_as_they_were_afterwards() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    with differentiable(), differentiable():
        pass
    assert torch.autograd.Function.__dict__["apply"] is before
    x = torch.ones(2, requires_grad=True)
    Rounded.apply(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.ones(2).sigmoid())
