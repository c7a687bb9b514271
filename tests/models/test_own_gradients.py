"""A ``torch.autograd.Function`` in a model's code keeps its gradient, wherever a cut lies and in either form."""

from __future__ import annotations

from collections.abc import Sequence
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
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide

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
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def bent(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        h = self.bent(h) + h / 8
        return self.c(torch.relu(self.b(h)) + h)


class OfNewForm(Net):
    def bent(self, x: Tensor) -> Tensor:
        return Reversed.apply(x, 0.5)


class OfOldForm(Net):
    def bent(self, x: Tensor) -> Tensor:
        return Rounded.apply(Rounded.apply(x))


class OfBoth(Net):
    def bent(self, x: Tensor) -> Tensor:
        return Rounded.apply(Reversed.apply(x, by=0.25))


class Checkpointed(Net):
    def bent(self, x: Tensor) -> Tensor:
        return checkpoint(lambda t: torch.relu(self.b(t)), x, use_reentrant=True)


class Hooked(Net):
    def bent(self, x: Tensor) -> Tensor:
        x.register_hook(torch.neg)
        return x


class HookedIfItLearns(Net):
    def bent(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(torch.neg)
        return x


class HookedLater(Net):
    """What a guard sees is made by operations, not by a layer; and a tuple holds it."""

    def bent(self, x: Tensor) -> Tensor:
        first, _second = (x / 2).chunk(2, dim=-1)
        if self.training and first.requires_grad and torch.is_grad_enabled():
            first.register_hook(torch.neg)
        return torch.cat((first, first), dim=-1)


class HookedNowhere(Net):
    """Neither what is cut off from the weights nor the samples require a gradient."""

    def bent(self, x: Tensor) -> Tensor:
        for each in (x.detach(), x.data):
            if each.requires_grad:
                each.register_hook(torch.neg)
        with torch.no_grad():
            y = self.b(x)
        if y.requires_grad:
            y.register_hook(torch.neg)
        return x

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(torch.neg)
        return super().forward(x)


class Twisted(nn.Linear):
    """A layer that no cut opens may have a hook."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: 3 * grad)
        return y


class HookedInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b = Twisted(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


@pytest.mark.sample(2)
@pytest.mark.parametrize("net", [OfNewForm, OfOldForm, OfBoth, Checkpointed, HookedNowhere])
def test_the_gradient_of_the_units_is_that_of_the_module(net: type[Net]) -> None:
    assert_same_gradient(net, None)


def test_a_hook_in_a_submodule_that_stays_closed_is_kept() -> None:
    assert_same_gradient(HookedInside, ("a", "b"))


def assert_same_gradient(net: type[Net], cuts: Sequence[str] | None) -> None:
    torch.manual_seed(0)
    module = net()
    spec = split(module, cuts, sample=SAMPLE, classes=3)
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])

    _, _, found, _ = gradient(
        Objective.of(OutputSide(spec, 0)), dict(spec.module.state_dict()), {"batch.0.x": x, "batch.0.y": y}
    )

    assert len(spec.units) == 3
    F.cross_entropy(module(x), y).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[spec.global_names[name]], parameter.grad)


@pytest.mark.sample(1)
@pytest.mark.parametrize("net", [Hooked, HookedIfItLearns, HookedLater])
def test_a_hook_on_a_tensor_keeps_a_model_whole(net: type[Net]) -> None:
    spec = split(net(), sample=SAMPLE, classes=3)

    assert spec.units == ("model",)
    with pytest.raises(ModelError, match=r"register_hook.*test_own_gradients\.py:\d+"):
        split(net(), ["a"], sample=SAMPLE, classes=3)


def test_both_forms_are_exported_and_agree_with_torch() -> None:
    bundle = edgefl.compile(
        edgefl.Model(OfBoth(), sample=SAMPLE, classes=3),
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
