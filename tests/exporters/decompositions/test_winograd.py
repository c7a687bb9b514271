"""F(2x2, 3x3): the numbers of a convolution and of its gradients, where it is taken, and what it lets wait."""

from __future__ import annotations

import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl_export.capture.trace import capture
from edgefl_export.decompositions import winograd
from edgefl_export.onnx.model import to_onnx

CHANNELS, SIDE, BATCH = 192, 8, 8
sides = st.integers(3, 9)


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), sides, sides, st.tuples(*[st.integers(0, 2)] * 2)
)
def test_it_is_the_same_convolution(
    batch: int, channels: int, out: int, height: int, width: int, padding: tuple[int, int]
) -> None:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(batch, channels, height, width, generator=made, requires_grad=True)
    w = torch.randn(out, channels, 3, 3, generator=made, requires_grad=True)
    y = nn.functional.conv2d(x, w, padding=padding)
    grad = torch.randn(y.shape, generator=made)
    dx, dw = torch.autograd.grad(y, (x, w), grad)
    sizes = winograd.WinogradPlan(batch, channels, out, (height, width), (y.shape[2], y.shape[3]), padding)

    torch.testing.assert_close(winograd.forward(x, w, sizes), y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(winograd.input_gradient(grad, w, sizes), dx, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(winograd.weight_gradient(grad, x, sizes), dw, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("x", "w", "taken"),
    [
        ((32, 512, 4, 4), (512, 512, 3, 3), True),
        ((32, 256, 8, 8), (256, 256, 3, 3), True),
        ((32, 128, 16, 16), (128, 128, 3, 3), True),
        ((32, 256, 32, 32), (256, 256, 3, 3), False),  # its tiles would take 134 MB, twice
        ((32, 64, 32, 32), (64, 64, 3, 3), False),  # what is brought to and fro outweighs it
        ((1, 512, 4, 4), (512, 512, 3, 3), False),  # as the kernel does for few positions
        ((32, 512, 4, 4), (512, 512, 5, 5), False),
        ((32, 512, 4, 4), (512, 512, 1, 1), False),
    ],
)
def test_it_is_taken_where_it_pays(x: tuple[int, ...], w: tuple[int, ...], taken: bool) -> None:
    assert (winograd.plan(x, w, (1, 1), torch.float32) is not None) == taken
    assert winograd.plan(x, w, (3, 3), torch.float32) is None
    assert winograd.plan(x, w, (1, 1), torch.float16) is None


def test_its_bound_is_that_of_the_gradient_too() -> None:
    """Without padding dL/dx is larger than y."""
    x, w = (64, 512, 6, 6), (512, 512, 3, 3)
    assert winograd.WinogradPlan(x[0], x[1], w[0], (6, 6), (4, 4), (0, 0)).pays
    assert winograd.plan(x, w, (0, 0), torch.float32) is None


def step(stride: int) -> Function:
    """y, dL/dx and dL/dw of a convolution; y is read again behind both, as what lies between two layers is."""

    def run(given: Tensors) -> Tensors:
        x, w = (given[name].requires_grad_() for name in ("batch.x", "state.w"))
        y = nn.functional.conv2d(x, w, given["state.b"], padding=1, stride=stride)
        dx, dw = torch.autograd.grad((y * y).mean(), (x, w))
        return {"update.y": y.detach(), "update.dx": dx, "update.dw": dw}

    shapes = {
        "batch.x": (BATCH, CHANNELS, SIDE, SIDE),
        "state.w": (CHANNELS, CHANNELS, 3, 3),
        "state.b": (CHANNELS,),
    }
    return Function("step", run, {name: TensorSpec(shape, torch.float32) for name, shape in shapes.items()})


@pytest.fixture(scope="module")
def model() -> bytes:
    return to_onnx(capture(step(stride=1)))


def test_a_graph_has_products_in_its_place_and_agrees_with_torch(model: bytes) -> None:
    kinds = {node.op_type for node in onnx.load_from_string(model).graph.node}
    assert "Conv" not in kinds
    assert "ConvTranspose" not in kinds
    given = {
        name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(1))
        for name, spec in step(1).inputs.items()
    }
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    found = session.run(None, {name: value.numpy() for name, value in given.items()})
    for value, expected in zip(found, step(1)(given).values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(value), expected, rtol=1e-4, atol=1e-4 * _most(expected))


def test_other_strides_stay_convolutions() -> None:
    graph = onnx.load_from_string(to_onnx(capture(step(stride=2)))).graph
    assert {"Conv", "ConvTranspose"} <= {node.op_type for node in graph.node}


def test_tiles_do_not_wait_for_the_backward_pass(model: bytes) -> None:
    """Once cut for the forward pass, once for the gradient: merged, four times the image would be kept between them."""
    assert_nothing_is_shared(model)


def test_nor_for_another_convolution_of_the_same_image_or_kernel() -> None:
    """As y and its derivative along (dx, dw) are: x * w, dx * w, x * dw."""

    def run(given: Tensors) -> Tensors:
        x, w = given["batch.x"], given["state.w"]

        def along(image: Tensor, kernel: Tensor) -> Tensor:
            return nn.functional.conv2d(image, kernel, padding=1)

        derived = torch.func.jvp(along, (x, w), (x.tanh(), w.tanh()))
        return {"update.y": derived[0], "update.dy": derived[1]}

    inputs = {name: spec for name, spec in step(1).inputs.items() if name != "state.b"}
    assert_nothing_is_shared(to_onnx(capture(Function("derivative", run, inputs))))


def assert_nothing_is_shared(model: bytes) -> None:
    """Each product over points reads two values that no other one reads."""
    nodes = onnx.load_from_string(model).graph.node
    makers = {name: node for node in nodes for name in node.output}

    def source(name: str) -> str:
        while makers[name].op_type in ("Reshape", "Transpose"):
            name = makers[name].input[0]
        return name

    transforms = [node for node in nodes if node.op_type == "MatMul" and makers.get(node.input[0]) is None]
    products = [node for node in nodes if node.op_type == "MatMul" and node not in transforms]
    factors = [source(name) for node in products for name in node.input]
    assert len(products) == 3
    assert len({*factors}) == len(factors)


def _most(values: Tensor) -> float:
    return max(1.0, float(values.abs().max()))
