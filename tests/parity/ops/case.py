"""A training step around one op, exported, beside torch in float32 and in float64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from tests.parity.forms import NAMES, made, runner

SEEDS = (1, 2, 3)
LR = 0.1
RELATIVE = 1e-4  # of the largest entry
ABSOLUTE = 1e-6  # a gradient that is zero in exact arithmetic is rounding noise
LABELS = 4  # integer inputs lie in [0, LABELS)


@dataclass(frozen=True)
class Labels:
    """An integer input, uniform in [0, LABELS)."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Uniform:
    """A float input in [0, 1) that is not differentiated: noise, probabilities."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Mask:
    """A boolean input, true for about half of the entries."""

    shape: tuple[int, ...]


Input = tuple[int, ...] | Labels | Uniform | Mask


class _Apply(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *inputs: Tensor) -> Any:
        return self.fn(*inputs)


class Case:
    """A layer or a plain function with the shapes of its inputs; a bare shape is a float that gets a gradient.

    It may return several tensors; those of floats take part in the loss, all are compared.
    """

    def __init__(self, op: nn.Module | Callable[..., Any], *inputs: Input) -> None:
        self.module = op if isinstance(op, nn.Module) else _Apply(op)
        self.inputs = inputs

    def ports(self) -> dict[str, TensorSpec]:
        """Parameters and float buffers as ``state.*``, the inputs as ``batch.*`` or ``noise.*``."""
        floats = {name: b for name, b in self.module.named_buffers() if b.is_floating_point()}
        tensors = {**dict(self.module.named_parameters()), **floats}
        ports = {f"state.{name}": TensorSpec.of(value) for name, value in tensors.items()}
        for index, item in enumerate(self.inputs):
            if isinstance(item, Labels):
                ports[f"batch.{index}.y"] = TensorSpec(item.shape, item.dtype)
            elif isinstance(item, Uniform | Mask):
                ports[f"noise.{index}.u"] = TensorSpec(item.shape)
            else:
                ports[f"batch.{index}.x"] = TensorSpec(item)
        return ports

    def step(self, again: bool = False) -> Function:
        """One SGD step on a curved loss; outputs: results, loss, input gradients, the state after the update.

        ``again`` asks torch for gradients that can be differentiated once more: it spells some of them out then.
        """

        def fn(tensors: Tensors) -> Tensors:
            results, leaves, wanted, moved = self._forward(tensors)
            loss = sum((curved(y) for y in results if y.is_floating_point()), torch.zeros(()))
            found = torch.autograd.grad(loss, list(wanted.values()), create_graph=again)
            grads = {name: grad.detach() for name, grad in zip(wanted, found, strict=True)}
            updated = {name: tensors[f"state.{name}"] - LR * grads[name] for name in leaves}
            outputs = {f"record.y{index}": y.detach() for index, y in enumerate(results)}
            outputs |= {f"record.grad.{name}": grad for name, grad in grads.items() if name not in leaves}
            return outputs | {"metric.loss": loss.detach()} | prefixed("state", updated | moved)

        return Function(type(self.module).__name__, fn, self.ports(), label_range=LABELS)

    def gradients(self) -> Function:
        """The op and its gradients alone: the gradients of the results are inputs, and nothing is updated."""
        ports = self.ports()
        results, *_ = self._forward({name: value.clone() for name, value in self._example().items()})
        cotangents = {
            f"batch.grad.{index}": TensorSpec.of(y)
            for index, y in enumerate(results)
            if y.is_floating_point() and y.requires_grad
        }

        def fn(tensors: Tensors) -> Tensors:
            results, _, wanted, moved = self._forward(tensors)
            ys = [y for y in results if y.is_floating_point() and y.requires_grad]
            grads = torch.autograd.grad(ys, list(wanted.values()), [tensors[name] for name in cotangents])
            outputs = {f"record.y{index}": y.detach() for index, y in enumerate(results)}
            outputs |= {f"record.grad.{name}": grad for name, grad in zip(wanted, grads, strict=True)}
            return outputs | prefixed("state", moved)

        return Function(type(self.module).__name__, fn, ports | cotangents, label_range=LABELS)

    def _example(self) -> Tensors:
        return Function("example", lambda tensors: tensors, self.ports(), label_range=LABELS).example(0)

    def _forward(self, tensors: Tensors) -> tuple[tuple[Tensor, ...], Tensors, Tensors, Tensors]:
        """Results, parameters, all tensors that get a gradient, and the buffers, which the module may change."""
        state = select(tensors, "state")
        parameters = [name for name, _ in self.module.named_parameters()]
        leaves = {name: state[name].detach().requires_grad_() for name in parameters}
        moved = {name: value.clone() for name, value in state.items() if name not in leaves}
        inputs: Tensors = {}
        for name, item in zip(self._names(), self.inputs, strict=True):
            value = tensors[name].clone()
            inputs[name] = (
                value > 0.5 if isinstance(item, Mask) else value.requires_grad_(name.endswith(".x"))
            )
        results = torch.func.functional_call(self.module, {**leaves, **moved}, tuple(inputs.values()))
        wanted = leaves | {name: value for name, value in inputs.items() if value.requires_grad}
        return _tuple(results), leaves, wanted, moved

    def _names(self) -> list[str]:
        return [name for name in self.ports() if not name.startswith("state.")]


Family = Mapping[str, Mapping[str, Case]]


def curved(y: Tensor) -> Tensor:
    """A loss whose gradient differs from entry to entry."""
    return (y * torch.cos(y)).mean()


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def every(
    family: Family, more: Collection[str] = (), rare: Collection[str] = (), *, differentiable: bool = False
) -> Any:
    """Parametrize a test over all cases of a family, each in both formats: ``case``, ``again``, ``form``.

    The default ring has, in one format, the first variant of each op and the cases that ``more`` names ("op, variant"):
    those that go another way through the exporters; those in ``rare``, which other cases are parts of, only the slow ring.
    Formats take turns. torch spells some gradients out where they may be differentiated again, as under torch.func.grad:
    with ``differentiable`` one of the two rows of a case asks so.
    """
    params, names, turn = [], set(), 0
    for name, first, case in _flat(family):
        names.add(name)
        for place, form in enumerate(NAMES):
            again = differentiable and (turn // 2 + place) % 2 == 1
            everyday = (first or name in more) and name not in rare and turn % 2 == place
            marks = () if everyday else pytest.mark.slow
            spelling = ", differentiable" if again else ""
            params.append(pytest.param(case, again, form, id=f"{name}{spelling}-{form}", marks=marks))
        turn += (first or name in more) and name not in rare
    assert {*more, *rare} <= names, {*more, *rare} - names
    return pytest.mark.parametrize(("case", "again", "form"), params)


def _flat(family: Family) -> Iterator[tuple[str, bool, Case]]:
    """Name, whether it is its op's first, and the case."""
    for op, variants in family.items():
        for number, (variant, case) in enumerate(variants.items()):
            yield f"{op}, {variant}" if variant else op, number == 0, case


def agrees(function: Function, form: str, seeds: Iterable[int] = SEEDS) -> None:
    """Assert that the exported graph gives what torch gives, in float32 and in float64, output by output, on the
    device's own engine of the format."""
    exported = made(form, function)
    if form == "onnx":
        assert not lossy(exported.model), (
            "onnxruntime's ScatterND loses additions where threads meet; use ScatterElements"
        )
    run = runner(exported)
    for seed in seeds:
        _same(form, function, run, seed)


def _same(form: str, function: Function, run: Callable[[Tensors], dict[str, np.ndarray]], seed: int) -> None:
    example = function.example(seed)
    found = run(example)
    for dtype in (torch.float32, torch.float64):
        expected = function({name: _cast(value.clone(), dtype) for name, value in example.items()})
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            _compare(f"{name} of seed {seed} beside {dtype} in {form}", value.detach(), found[name])


def lossy(model: bytes) -> list[str]:
    """Nodes that add by ScatterND."""
    nodes = onnx.load_from_string(model).graph.node
    return [node.name for node in nodes if node.op_type == "ScatterND" and node.attribute]


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _compare(what: str, expected: Tensor, found: np.ndarray) -> None:
    result = torch.from_numpy(np.asarray(found))
    assert result.shape == expected.shape, what
    if not expected.is_floating_point():
        assert result.dtype == expected.dtype and torch.equal(result, expected), what
        return
    if expected.numel():
        assert result.dtype == torch.float32, what
        error = (result.double() - expected.double()).abs().max().item()
        allowed = RELATIVE * expected.abs().max().item() + ABSOLUTE
        assert error <= allowed, f"{what}: off by {error:.3g}, allowed are {allowed:.3g}"
