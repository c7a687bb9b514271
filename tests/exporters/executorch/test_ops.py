"""Ops on XNNPACK and on ExecuTorch's kernels beside torch, each as the smallest graph that has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ExportError
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.trace import capture
from edgefl_export.executorch.check.programs import verify
from edgefl_export.executorch.graph import to_kernel_ops
from edgefl_export.executorch.program import partition
from edgefl_export.executorch.program.partition import steps_of
from edgefl_export.executorch.program.write import to_executorch

Case = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]


def function(fn: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Function:
    ports = {f"batch.0.{index}": TensorSpec(shape) for index, shape in enumerate(shapes)}
    return Function("example", lambda t: {"metric.y": fn(*(t[name] for name in ports))}, ports)


def delegated(lowered: LoweredGraph) -> list[bool]:
    return [step.delegated for step in steps_of(to_kernel_ops(lowered))]


def positive(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: fn(x.abs() + 0.1)


ON_XNNPACK: dict[str, Case] = {
    "broadcast sum": (lambda x, y: x + y, ((3, 4), (4,))),
    "sum with a number": (lambda x: x + 2.5, ((3, 4),)),
    "number minus tensor": (lambda x: 1 - x, ((3, 4),)),
    "product with a scalar port": (lambda x, y: x * y, ((3, 4), ())),
    "numbers and scalar ports alone": (lambda x, y: x * y * 3.0, ((), ())),
    "quotient": (lambda x, y: x / (y.abs() + 1), ((3, 4), (3, 1))),
    "reciprocal": (positive(torch.reciprocal), ((3, 4),)),
    "larger and smaller": (lambda x, y: torch.maximum(x, y) - torch.minimum(x, y), ((3, 4), (4,))),
    "exp": (torch.exp, ((3, 4),)),
    "log": (positive(torch.log), ((3, 4),)),
    "root": (positive(torch.sqrt), ((3, 4),)),
    "inverse root": (positive(torch.rsqrt), ((3, 4),)),
    "tanh": (torch.tanh, ((3, 4),)),
    "sigmoid": (torch.sigmoid, ((3, 4),)),
    "gelu": (F.gelu, ((3, 4),)),
    "relu": (torch.relu, ((3, 4),)),
    "clamp": (lambda x: x.clamp(-0.5, 0.25), ((3, 4),)),
    "rounding up and down": (lambda x: torch.ceil(3 * x) - torch.floor(5 * x), ((3, 4),)),
    "square": (lambda x: x**2, ((3, 4),)),
    "cube": (lambda x: x**3, ((3, 4),)),
    "powers": (positive(lambda x: x**0.5 + x**-0.5 + x**-1 + x**-2), ((3, 4),)),
    "product of matrices": (torch.matmul, ((3, 4), (4, 5))),
    "right transposed": (lambda x, y: x @ y.t(), ((3, 4), (5, 4))),
    "left transposed": (lambda x, y: x.t() @ y, ((4, 3), (4, 5))),
    "both transposed": (lambda x, y: x.t() @ y.t(), ((4, 3), (5, 4))),
    "product plus bias": (torch.addmm, ((5,), (3, 4), (4, 5))),
    "batched product": (torch.matmul, ((2, 3, 4), (2, 4, 5))),
    "batched, right transposed": (lambda x, y: x @ y.transpose(1, 2), ((2, 3, 4), (2, 5, 4))),
    "batched twice": (torch.matmul, ((2, 6, 3, 4), (2, 6, 4, 5))),
    "permutation": (lambda x: x.permute(2, 0, 1) + 0.5, ((2, 3, 4),)),
    "permuted result": (lambda x: (x + 1).permute(2, 0, 1).contiguous(), ((2, 3, 4),)),
    "slice": (lambda x: x[:, 1:3] * 1.5, ((2, 5),)),
    "slice from the end": (lambda x: x[:, -2:] * 1.5, ((2, 5),)),
    "slice of more than there is": (lambda x: x[:, -100:].exp() @ x[:, -100:].t(), ((2, 5),)),
    "one of an axis": (lambda x: x[:, 2] * 2, ((2, 5, 3),)),
    "padding": (lambda x: F.pad(x, (1, 2, 0, 3), value=0.5), ((2, 3),)),
    "many joined": (lambda x, y: torch.cat([x, y, x, y, x, y, x], 1), ((2, 3), (2, 4))),
    "expansion": (lambda x: x.expand(4, 2, 3).contiguous(), ((2, 1),)),
    "softmax": (lambda x: x.softmax(-1), ((3, 4),)),
    "sum of all": (torch.sum, ((3, 4),)),
    "sum over the first axis": (lambda x: x.sum(0), ((3, 4),)),
    "sum over the last axis": (lambda x: x.sum(1, keepdim=True), ((3, 4),)),
    "sum over axes apart": (lambda x: x.sum((0, 2)), ((3, 4, 5),)),
    "sum over batch and positions": (lambda x: x.sum((0, 2, 3)), ((3, 4, 5, 6),)),
    "mean of many": (lambda x: x.mean((0, 1, 2)), ((8, 16, 16, 3),)),
    "mean of a prime count": (lambda x: x.mean(0), ((263, 3),)),
    "sum of an odd count in the middle": (lambda x: x.sum(1), ((4, 7, 3),)),
    "sum of six in the middle": (lambda x: x.sum(1), ((4, 6, 3),)),
    "view between": (lambda x, y: (x + y).reshape(4, 3) @ (x * y), ((3, 4), (3, 4))),
    "view of an input": (lambda x, y: x.reshape(6, 2) * y, ((3, 4), (6, 2))),
    "view as result": (lambda x, y: (x * y).reshape(6, 2), ((3, 4), (3, 4))),
}

ON_KERNELS: dict[str, Case] = {
    "comparison and selection": (lambda x, y: torch.where(x > y, x, 2 * y), ((3, 4), (4,))),
    "largest of an axis": (lambda x: x.amax(1, keepdim=True), ((3, 4),)),
    "place of the largest": (lambda x: x.argmax(1), ((3, 4),)),
    "best entries": (lambda x: x.topk(2, 1)[0], ((3, 4),)),
    "places of the best": (lambda x: x.topk(2, 1)[1], ((3, 4),)),
    "chosen rows": (lambda x: x[torch.tensor([2, 0])], ((3, 4),)),
    "running sum": (lambda x: x.cumsum(1), ((3, 4),)),
    "sign": (torch.sign, ((3, 4),)),
    "bytes": (lambda x: (x > 0).to(torch.uint8), ((3, 4),)),
    "halves of words": (lambda x: (x > 0).to(torch.int32).mul(40000).to(torch.uint16), ((3, 4),)),
    "bool": (lambda x: x > 0, ((3, 4),)),
    "every other": (lambda x: x[:, ::2].contiguous(), ((3, 4),)),
    "flip": (lambda x: x.flip(1), ((3, 4),)),
    "count": (lambda x: (x > 0).sum(), ((3, 4),)),
    "nothing of a tensor": (lambda x: torch.cat([x[:0].sign(), x.sign()]), ((3, 4),)),
    "constant": (lambda x: x.new_ones(3) + torch.arange(3), ((2,),)),
}


@pytest.mark.sample(17)
@pytest.mark.parametrize("name", ON_XNNPACK)
def test_xnnpack_computes_what_torch_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "LEAST", 0.0)
    fn, shapes = ON_XNNPACK[name]
    example = function(fn, *shapes)
    lowered = capture(example)

    assert delegated(lowered) == [True]
    verify(example, to_executorch(lowered).model, 3)


@pytest.mark.sample(17)
@pytest.mark.parametrize("name", ON_XNNPACK)
def test_kernels_alone_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "supported", lambda node: False)
    fn, shapes = ON_XNNPACK[name]
    example = function(fn, *shapes)

    verify(example, to_executorch(capture(example)).model, 3)


@pytest.mark.parametrize("name", ON_KERNELS)
def test_kernels_compute_what_xnnpack_has_not(name: str) -> None:
    fn, shapes = ON_KERNELS[name]
    example = function(fn, *shapes)
    lowered = capture(example)

    verify(example, to_executorch(lowered).model, 3)


def test_sums_of_whole_numbers_are_whole() -> None:
    example = function(lambda x: (torch.floor(100 * x) * 2 + 1).sum((0, 1)), (31, 49, 3))
    lowered = capture(example)

    assert delegated(lowered) == [True]
    assert verify(example, to_executorch(lowered).model, 3).worst == 0


def test_few_cheap_nodes_are_not_worth_a_delegate() -> None:
    assert delegated(capture(function(lambda x: x + 1, (3, 4)))) == [False]
    assert delegated(capture(function(torch.matmul, (3, 4), (4, 5)))) == [True]


def test_an_op_without_a_kernel_is_named_with_its_line() -> None:
    example = function(torch.special.bessel_j0, (3,))

    with pytest.raises(
        ExportError, match=r"aten\.special_bessel_j0.* has no kernel in ExecuTorch .*test_ops\.py:\d+"
    ):
        to_executorch(capture(example))


def test_a_convolution_of_too_many_axes_is_named_with_its_line() -> None:
    example = function(
        lambda x, w: F.conv3d(x.double(), w.double()).float(), (1, 2, 4, 4, 4), (3, 2, 2, 2, 2)
    )

    with pytest.raises(
        ExportError, match=r"aten\.convolution.* has no kernel in ExecuTorch .*test_ops\.py:\d+"
    ):
        to_executorch(capture(example))


def test_a_type_that_executorch_lacks_is_named_with_its_line() -> None:
    example = function(lambda x: x.to(torch.int32).to(torch.uint32).to(torch.float32), (3,))

    with pytest.raises(ExportError, match=r"uint32 tensor .*test_ops\.py:\d+"):
        to_executorch(capture(example))


@pytest.mark.parametrize(
    ("example", "port"),
    [
        (function(lambda x: x[:0] * 2, (3, 4)), "output 'metric.y'"),
        (function(lambda x, y: x.sum() + y.sum(), (0, 4), (2,)), "input 'batch.0.0'"),
    ],
)
def test_a_port_of_no_entries_is_named(example: Function, port: str) -> None:
    with pytest.raises(ExportError, match=rf"{port} of function 'example' has no entries \(shape \[0, 4\]\)"):
        to_executorch(capture(example))
