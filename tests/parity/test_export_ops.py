"""Exported training graphs equal torch: forward, gradients and update of small functions, each op on its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.programs.contract import Function, Tensors, TensorSpec, prefixed, select
from exporters.capture import capture
from exporters.onnx import to_onnx
from exporters.verify import verify

SEEDS = (1, 2)
LR = 0.1


# torch spells some gradients out where they may be differentiated again, as under torch.func.grad.
gradients = pytest.mark.parametrize("again", [False, True], ids=["once", "differentiable"])


def training_step(
    module: nn.Module, shape: tuple[int, ...], loss: Callable[[Tensor], Tensor], again: bool = False
) -> Function:
    """One SGD step of ``module``; the gradient of its input is an output too, so that it is compared."""
    parameters = dict(module.named_parameters())
    buffers = {k: b for k, b in module.named_buffers() if b.is_floating_point()}
    ports = {f"state.{name}": TensorSpec.of(value) for name, value in {**parameters, **buffers}.items()}
    ports["batch.0.x"] = TensorSpec(shape)

    def fn(tensors: Tensors) -> Tensors:
        state = select(tensors, "state")
        x = tensors["batch.0.x"].clone().requires_grad_()
        leaves = {name: state[name].detach().requires_grad_() for name in parameters}
        moved = {name: state[name].clone() for name in buffers}
        y = torch.func.functional_call(module, {**leaves, **moved}, (x,))
        value = loss(y)
        grad_x, *grads = torch.autograd.grad(value, [x, *leaves.values()], create_graph=again)
        updated = {name: state[name] - LR * grad.detach() for name, grad in zip(leaves, grads, strict=True)}
        outputs = {"record.y": y.detach(), "record.grad": grad_x.detach(), "metric.loss": value.detach()}
        return outputs | prefixed("state", {**updated, **moved})

    return Function(type(module).__name__, fn, ports)


def curved(y: Tensor) -> Tensor:
    """A loss whose gradient differs from entry to entry."""
    return (y * torch.cos(y)).mean()


def agrees(function: Function) -> None:
    model = to_onnx(capture(function))
    for seed in SEEDS:
        verify(function, model, seed)


CONVOLUTIONS = {
    "plain": (nn.Conv2d(3, 4, 3), (2, 3, 7, 6)),
    "padded, no bias": (nn.Conv2d(16, 8, 3, padding=1, bias=False), (2, 16, 6, 6)),
    "pointwise": (nn.Conv2d(16, 8, 1), (2, 16, 5, 5)),
    "pointwise, strided": (nn.Conv2d(16, 8, 1, stride=2), (2, 16, 7, 7)),
    "strided, odd remainder": (nn.Conv2d(16, 4, 3, stride=2, padding=1), (2, 16, 8, 7)),
    "stride leaves rows unread": (nn.Conv2d(3, 4, 3, stride=3), (2, 3, 10, 11)),
    "stride larger than kernel": (nn.Conv2d(3, 4, 2, stride=3), (2, 3, 10, 11)),
    "dilated": (nn.Conv2d(16, 4, 3, dilation=2, padding=2), (2, 16, 9, 8)),
    "dilated and strided": (nn.Conv2d(16, 4, 3, dilation=2, stride=2, padding=1), (2, 16, 11, 10)),
    "uneven kernel and padding": (nn.Conv2d(8, 4, (1, 5), padding=(0, 2), stride=(2, 1)), (2, 8, 6, 7)),
    "padding beyond the kernel": (nn.Conv2d(3, 4, 1, padding=1), (2, 3, 5, 5)),
    "grouped": (nn.Conv2d(6, 4, 3, groups=2, padding=1), (2, 6, 6, 5)),
    "grouped, strided": (nn.Conv2d(6, 9, 3, groups=3, stride=2), (2, 6, 8, 9)),
    "depthwise": (nn.Conv2d(5, 5, 3, groups=5, padding=1), (2, 5, 6, 6)),
    "depthwise, multiplied": (nn.Conv2d(4, 8, 3, groups=4, padding=1, stride=2), (2, 4, 7, 7)),
    "large kernel": (nn.Conv2d(3, 4, 9, padding=4), (2, 3, 12, 10)),
    "large kernel, strided, grouped": (nn.Conv2d(4, 6, 9, padding=2, stride=2, groups=2), (2, 4, 16, 15)),
    "one dimension": (nn.Conv1d(16, 4, 5, stride=2, padding=2), (3, 16, 12)),
    "one dimension, dilated, grouped": (nn.Conv1d(6, 4, 3, dilation=3, groups=2), (3, 6, 12)),
    "transposed": (nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1), (2, 4, 5, 4)),
    "transposed, grouped": (nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 4)),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case: str) -> None:
    module, shape = CONVOLUTIONS[case]
    agrees(training_step(module, shape, curved))


LAYERS = {
    "linear": (nn.Linear(6, 4), (3, 6)),
    "linear, no bias": (nn.Linear(6, 4, bias=False), (3, 6)),
    "linear on sequences": (nn.Linear(6, 4), (3, 5, 6)),
    "batch norm 2d": (nn.BatchNorm2d(5), (4, 5, 3, 6)),
    "batch norm 1d": (nn.BatchNorm1d(5), (8, 5)),
    "batch norm 1d on sequences": (nn.BatchNorm1d(5), (4, 5, 7)),
    "batch norm without affine": (nn.BatchNorm2d(5, affine=False), (4, 5, 3, 6)),
    "batch norm without running statistics": (nn.BatchNorm2d(5, track_running_stats=False), (4, 5, 3, 6)),
    "frozen batch norm": (nn.BatchNorm2d(5).eval(), (4, 5, 3, 6)),
    "frozen batch norm without affine": (nn.BatchNorm2d(5, affine=False).eval(), (4, 5, 3, 6)),
    "layer norm": (nn.LayerNorm(6), (4, 5, 6)),
    "group norm": (nn.GroupNorm(2, 6), (4, 6, 5, 3)),
    "group norm and silu": (nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.SiLU()), (4, 3, 6, 5)),
    "group norm without affine": (nn.GroupNorm(2, 6, affine=False), (4, 6, 5, 3)),
    "transformer encoder": (
        nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True),
        (2, 5, 8),
    ),
    "transformer encoder, inference": (
        nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True).eval(),
        (2, 5, 8),
    ),
}


@gradients
@pytest.mark.parametrize("case", LAYERS)
def test_layer(case: str, again: bool) -> None:
    module, shape = LAYERS[case]
    agrees(training_step(module, shape, curved, again))


PARAMETERLESS = {
    "max pool": (nn.MaxPool2d(2), (2, 3, 6, 8)),
    "max pool, overlapping and padded": (nn.MaxPool2d(3, stride=2, padding=1), (2, 3, 7, 8)),
    "max pool, dilated": (nn.MaxPool2d(2, stride=1, dilation=2), (2, 3, 7, 8)),
    "max pool, ceil": (nn.MaxPool2d(2, ceil_mode=True), (2, 3, 7, 5)),
    "max pool with ties": (nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, stride=2)), (2, 3, 9, 9)),
    "max pool 1d": (nn.MaxPool1d(3, stride=2), (2, 3, 9)),
    "avg pool": (nn.AvgPool2d(2), (2, 3, 6, 8)),
    "avg pool, overlapping and padded": (nn.AvgPool2d(3, stride=2, padding=1), (2, 3, 7, 8)),
    "avg pool, padding not counted": (
        nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
        (2, 3, 7, 8),
    ),
    "avg pool, own divisor": (nn.AvgPool2d(3, stride=2, divisor_override=5), (2, 3, 7, 8)),
    "avg pool, ceil": (nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True), (2, 3, 6, 8)),
    "avg pool, ceil, padding not counted": (
        nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
        (2, 3, 6, 8),
    ),
    "global avg pool": (nn.AdaptiveAvgPool2d(1), (2, 3, 7, 8)),
    "adaptive avg pool": (nn.AdaptiveAvgPool2d((2, 4)), (2, 3, 6, 8)),
    "adaptive avg pool, uneven": (nn.AdaptiveAvgPool2d((3, 5)), (2, 3, 7, 8)),
    "adaptive avg pool, flattened": (
        nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.ReLU(), nn.Flatten()),
        (2, 3, 8, 8),
    ),
    "adaptive avg pool, enlarged and flattened": (
        nn.Sequential(nn.AdaptiveAvgPool2d(7), nn.Flatten()),
        (2, 3, 4, 4),
    ),
    "avg pool, ceil, flattened": (nn.Sequential(nn.AvgPool2d(3, ceil_mode=True), nn.Flatten()), (2, 3, 7, 8)),
    "relu": (nn.ReLU(), (4, 6)),
    "leaky relu": (nn.LeakyReLU(0.1), (4, 6)),
    "hardtanh": (nn.ReLU6(), (4, 6)),
    "gelu": (nn.GELU(), (4, 6)),
    "silu": (nn.SiLU(), (4, 6)),
    "sigmoid": (nn.Sigmoid(), (4, 6)),
    "tanh": (nn.Tanh(), (4, 6)),
    "softmax": (nn.Softmax(dim=1), (4, 6)),
    "log softmax": (nn.LogSoftmax(dim=1), (4, 6)),
    "flatten": (nn.Flatten(), (2, 3, 4, 5)),
}


@gradients
@pytest.mark.parametrize("case", PARAMETERLESS)
def test_operator(case: str, again: bool) -> None:
    module, shape = PARAMETERLESS[case]
    agrees(training_step(module, shape, curved, again))


CROSS_ENTROPIES: dict[str, dict[str, object]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "weighted": {"weight": torch.tensor([0.5, 1.0, 2.0, 0.1])},
    "one label ignored": {"ignore_index": 2},
    "smoothed": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("case", CROSS_ENTROPIES)
def test_cross_entropy(case: str) -> None:
    def fn(tensors: Tensors) -> Tensors:
        w = tensors["state.w"].detach().requires_grad_()
        loss = F.cross_entropy(tensors["batch.0.x"] @ w, tensors["batch.0.y"], **CROSS_ENTROPIES[case])
        (grad,) = torch.autograd.grad(loss, [w])
        return {"state.w": tensors["state.w"] - tensors["hyper.lr"] * grad, "metric.loss": loss.detach()}

    ports = {
        "state.w": TensorSpec((6, 4)),
        "batch.0.x": TensorSpec((8, 6)),
        "batch.0.y": TensorSpec((8,), torch.int64),
        "hyper.lr": TensorSpec(()),
    }
    agrees(Function("cross_entropy", fn, ports, label_range=4))


def test_embedding() -> None:
    def fn(tensors: Tensors) -> Tensors:
        w = tensors["state.w"].detach().requires_grad_()
        (grad,) = torch.autograd.grad(curved(F.embedding(tensors["batch.0.x"], w)), [w])
        return {"state.w": tensors["state.w"] - LR * grad}

    ports = {"state.w": TensorSpec((7, 3)), "batch.0.x": TensorSpec((4, 5), torch.int64)}
    agrees(Function("embedding", fn, ports, label_range=7))
