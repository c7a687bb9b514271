"""Comparison of modules in which rounding decides at kinks, and training in float64."""

from __future__ import annotations

from itertools import count
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor, nn

import edgefl
from edgefl.comparison import torch_side
from edgefl.comparison.compare import STEPS, compare
from edgefl.comparison.inputs import batches
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec

SEED = 3


class Shift(nn.Module):
    """Sum of its input and a number."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def shifted(by: float, act: nn.Module) -> nn.Module:
    """Return a deep model with batch norm of values far from zero, of which float32 keeps few digits."""
    torch.manual_seed(SEED)
    layers = [
        nn.Sequential(nn.Linear(64, 64), Shift(by), nn.BatchNorm1d(64), nn.Dropout(0.1), act)
        for _ in range(6)
    ]
    return nn.Sequential(*layers, nn.Linear(64, 3))


def cut(module: nn.Module, cuts: tuple[str, ...] | None = None) -> ModelSpec:
    return edgefl.submodels.split(module, cuts, sample=TensorSpec((64,)), classes=3)


@pytest.mark.sample(3)
@pytest.mark.parametrize("shift", [300.0, 1000.0])
@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(), nn.Hardswish()], ids=str)
def test_a_module_with_many_kinks_agrees(shift: float, act: nn.Module) -> None:
    compare(cut(shifted(shift, act)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("offset", [-0.1, 0.1])
def test_a_difference_among_many_kinks_is_named(offset: float) -> None:
    module = shifted(300.0, nn.ReLU())
    spec = cut(module, ("2",))
    module.get_submodule("2.2").register_forward_hook(lambda _m, _a, out: out + offset)
    with pytest.raises(ModelError, match=r"would not be trained as torch trains it"):
        compare(spec)


class Single(nn.Module):
    """A layer with code that runs in float32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError(f"expected float32, found {x.dtype}")
        out: Tensor = self.layer(x)
        return out


def test_samples_that_differ_are_not_forgiven_where_float64_fails() -> None:
    torch.manual_seed(SEED)
    module, calls = Single(), count()
    spec = cut(nn.Sequential(module, nn.Linear(8, 3)), ("1",))
    # A fault of the first samples; those that are drawn after them would agree.
    handle = module.layer.register_forward_hook(lambda _m, _a, out: 2 * out if next(calls) < STEPS else out)
    with pytest.raises(ModelError, match="would not be trained as torch trains it"):
        compare(spec)
    handle.remove()
    compare(spec)


def test_training_in_float64_draws_the_same_numbers() -> None:
    spec = cut(shifted(0.0, nn.Tanh()))
    assert spec.source is not None
    samples = batches(spec, 6, 3, SEED, attempt=1)
    single = torch_side.train(spec.source, spec.loss, samples, SEED)
    double = torch_side.train(spec.source, spec.loss, samples, SEED, rate=single.rate, double=True)
    assert double.losses == pytest.approx(single.losses, rel=1e-5)
    assert {each.dtype for each in double.gradients.values()} == {torch.float64}
    for one, other in zip(single.streams, double.streams, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.drawn, other.drawn, strict=True))


def test_training_in_float64_leaves_the_module_as_it_was() -> None:
    module = shifted(0.0, nn.ReLU())
    heard = SimpleQueue[torch.dtype]()  # what a list of the hook's holds would be restored, too
    handle = module.get_parameter("6.weight").register_hook(lambda slope: heard.put(slope.dtype))
    spec = cut(module)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = {name: (each.data_ptr(), each.detach().clone()) for name, each in tensors.items()}
    assert spec.source is not None
    while not heard.empty():
        heard.get()
    torch_side.train(spec.source, spec.loss, batches(spec, 6, 2, SEED, attempt=1), SEED, double=True)
    handle.remove()
    assert [heard.get_nowait() for _ in range(heard.qsize())] == [torch.float64] * 2
    for name, each in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
        assert each is tensors[name]
        assert (each.data_ptr(), each.dtype) == (before[name][0], before[name][1].dtype)
        assert torch.equal(each, before[name][1])
