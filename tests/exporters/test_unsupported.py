"""An op that ONNX cannot say is told by name, with the module and the line that call it, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from edgefl.programs.contract import Function, Tensors, TensorSpec
from edgefl.wire.errors import ExportError
from exporters.capture import capture
from exporters.onnx import to_onnx

HERE = Path(__file__)


@torch.library.custom_op("edgefl_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: grad * 2)


class Layer(nn.Module):
    """A linear layer with a function of one's own behind it."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.linear(x))


def step(module: nn.Module) -> Function:
    parameters = dict(module.named_parameters())
    ports = {f"state.{name}": TensorSpec.of(value) for name, value in parameters.items()}

    def fn(tensors: Tensors) -> Tensors:
        leaves = {name: tensors[f"state.{name}"].detach().requires_grad_() for name in parameters}
        loss = torch.func.functional_call(module, leaves, (tensors["batch.0.x"],)).square().mean()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return {f"state.{name}": leaves[name].detach() - g for name, g in zip(leaves, grads, strict=True)}

    return Function("train", fn, ports | {"batch.0.x": TensorSpec((2, 4))})


def refusal(module: nn.Module) -> ExportError:
    with pytest.raises(ExportError) as caught:
        to_onnx(capture(step(module)))
    return caught.value


def line_of(text: str) -> str:
    """``file:line`` of the line of this file that ends with the comment ``# text``."""
    lines = HERE.read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if line.endswith(f"# {text}")]
    return f"{HERE}:{number}"


def spectrum(x: Tensor) -> Tensor:
    return torch.linalg.svd(x)[1]  # forward


def folded(x: Tensor) -> Tensor:
    cells = x.reshape(1, 1, 2, 2, -1)
    return nn.functional.avg_pool3d(cells, 2)  # backward


def bessel(x: Tensor) -> Tensor:
    return torch.special.i0(x)  # decomposed


def middle(x: Tensor) -> Tensor:
    return torch.median(x, 1).values  # sorted


def custom(x: Tensor) -> Tensor:
    return doubled(x)  # custom


@pytest.mark.parametrize(
    ("fn", "op", "comment"),
    [
        (spectrum, "aten._linalg_svd.default", "forward"),
        (middle, "aten.median.dim", "sorted"),
        (custom, "edgefl_tests.doubled.default", "custom"),
    ],
)
def test_an_op_of_the_forward_pass_is_told_with_its_line(fn: Callable, op: str, comment: str) -> None:
    error = refusal(Layer(fn))

    assert error.details["op"] == op
    assert error.details["module"] == "Layer"
    assert error.details["source"] == line_of(comment)
    assert op in error.message and line_of(comment) in error.message
    assert "exporters/decompositions" in error.message


def test_an_op_that_only_the_gradient_needs_is_told_with_the_line_of_the_forward_call() -> None:
    error = refusal(Layer(folded))

    assert error.details["op"] == "aten.avg_pool3d_backward.default"
    assert error.details["module"] == "Layer"
    assert error.details["source"] == line_of("backward")
    assert "in the gradient of what is called" in error.message


def test_an_op_that_a_decomposition_brings_in_is_told_as_the_op_that_was_called() -> None:
    error = refusal(Layer(bessel))

    assert error.details["op"] == "aten.i0.default"
    assert error.details["source"] == line_of("decomposed")


@pytest.mark.parametrize("fn", [spectrum, folded])
def test_the_path_of_a_nested_module_is_told(fn: Callable) -> None:
    inner = nn.Sequential(nn.ReLU(), Layer(fn))
    module = nn.Sequential(Layer(torch.tanh), inner)

    error = refusal(module)

    assert error.details["module"] == "1.1 (Layer)"
    assert "in module 1.1 (Layer)" in error.message


def test_a_supported_module_beside_it_is_not_blamed() -> None:
    error = refusal(nn.Sequential(Layer(torch.relu), Layer(folded)))

    assert error.details["module"] == "1 (Layer)"
