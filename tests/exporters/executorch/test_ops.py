"""Ops on XNNPACK and on ExecuTorch's kernels beside torch, each as the smallest graph that has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ExportError
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.trace import capture
from edgefl_export.decompositions import core_table
from edgefl_export.executorch.check.programs import verify
from edgefl_export.executorch.graph import move_transpositions, to_kernel_ops
from edgefl_export.executorch.program import partition
from edgefl_export.executorch.program.partition import steps_of
from edgefl_export.executorch.program.write import to_executorch
from edgefl_export.executorch.rules import RULES, arithmetic, convolution, normalization, pooling, table

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


# -- transpositions go where they cost least, without a change of results ----------------------------------


_aten = torch.ops.aten


def _traced(function: object, *example: Tensor) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="fake", decomposition_table=table())(*example)  # type: ignore[arg-type]
    output = module.graph.output_node()
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
    return module


def _moved(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, mapping := {}))
    graph.output_node().args = (tuple(mapping[node] for node in module.graph.output_node().args[0]),)
    copy = fx.GraphModule(module, graph)
    move_transpositions(copy)
    copy.recompile()
    return copy


def _of_images(module: fx.GraphModule) -> list[list[int]]:
    """Orders of the transpositions of four axes."""
    return [
        list(node.args[1])  # type: ignore[arg-type]
        for node in module.graph.nodes
        if node.target is _aten.permute.default and len(node.args[1]) == 4  # type: ignore[arg-type]
    ]


def _block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = torch.conv2d(x, w, padding=1).relu()
    z = torch.conv2d(y, v, padding=1)
    return torch.cat([z + y, y * 2], 1).mean((2, 3))


def _arrays(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_images_are_turned_once_and_stay_channels_last_to_the_end() -> None:
    example = _arrays((2, 8, 6, 6), (8, 8, 3, 3), (8, 8, 3, 3))
    before = _traced(_block, *example)

    after = _moved(before)

    assert _of_images(before).count([0, 3, 1, 2]) >= 2
    assert [0, 3, 1, 2] not in _of_images(after)
    assert _of_images(after).count([0, 2, 3, 1]) == 1
    torch.testing.assert_close(after(*example)[0], _block(*example), rtol=1e-5, atol=1e-5)


def test_moving_transpositions_changes_no_result_of_a_training_step() -> None:
    def step(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        def loss(kernel: Tensor) -> Tensor:
            y = torch.max_pool2d(torch.conv2d(x, kernel, stride=2, padding=1).relu() * scale, 2)
            return (torch.nn.functional.pad(y, (1, 2, 0, 1))[:, 1:, :, 1:] ** 2).mean((1, 2, 3)).sum()

        leaf = w.detach().requires_grad_()
        return (torch.autograd.grad(loss(leaf), leaf)[0],)

    example = _arrays((2, 4, 12, 12), (6, 4, 3, 3), (6, 1, 1))
    joint = make_fx(step)(*example)
    before = _traced(torch.func.functionalize(joint), *example)

    after = _moved(before)

    assert len(_of_images(after)) < len(_of_images(before))
    torch.testing.assert_close(after(*example)[0], step(*example)[0], rtol=1e-4, atol=1e-4)


def test_what_has_other_orders_stays_as_it_is() -> None:
    def product(x: Tensor) -> Tensor:
        return (x.permute(0, 2, 1, 3) * 2).reshape(2, -1)

    (x,) = _arrays((2, 3, 4, 5))
    after = _moved(_traced(product, x))

    assert _of_images(after) == [[0, 2, 1, 3]]
    torch.testing.assert_close(after(x)[0], product(x))


# -- the rules for ExecuTorch give what torch gives --------------------------------------------------------


TOLERANCE = 2e-5


def _close(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None and theirs is not None
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE * (1 + float(theirs.abs().max())))


@st.composite
def _convolutions(draw: st.DrawFn) -> dict[str, object]:
    """Sizes of a convolution whose kernel fits into the padded image."""
    per, out, groups = draw(
        st.sampled_from([(3, 5, 1), (1, 4, 1), (16, 6, 1), (1, 1, 4), (2, 3, 2), (1, 2, 3), (8, 4, 1)])
    )
    rank = draw(st.sampled_from([1, 2, 2, 2]))
    axis = st.tuples(*[st.integers(1, 4)] * rank)
    case = {
        "x": (3, per * groups, *draw(st.tuples(*[st.integers(4, 11)] * rank))),
        "w": (out * groups, per, *draw(axis)),
        "stride": list(draw(st.tuples(*[st.integers(1, 3)] * rank))),
        "padding": list(draw(st.tuples(*[st.integers(0, 3)] * rank))),
        "dilation": list(draw(st.tuples(*[st.integers(1, 2)] * rank))),
        "groups": groups,
    }
    reach = [(k - 1) * d + 1 for k, d in zip(case["w"][2:], case["dilation"], strict=True)]
    assume(all(n + 2 * p >= r for n, p, r in zip(case["x"][2:], case["padding"], reach, strict=True)))
    return case


@given(_convolutions(), st.integers(0, 2**16), st.sampled_from([1, 200, 2**20]))
def test_a_convolution_and_its_gradients_are_torchs(case: dict[str, object], seed: int, most: int) -> None:
    """``most``: numbers at a time; with few of them the batch is taken in parts."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(case[name], generator=generator) for name in ("x", "w"))
    bias = torch.randn(w.shape[0], generator=generator)
    moves = case["stride"], case["padding"], case["dilation"], False, [0] * (x.dim() - 2), case["groups"]

    expected = _aten.convolution(x, w, bias, *moves)
    grad = torch.randn(expected.shape, generator=generator)
    rest = (grad, x, w, [w.shape[0]], *moves, [True] * 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "MOST_AT_ONCE", most)
        _close([convolution.convolution(x, w, bias, *moves)], [expected])
        _close(convolution.convolution_backward(*rest), _aten.convolution_backward(*rest))


@given(_convolutions(), st.integers(0, 2**16))
def test_a_transposed_convolution_is_torchs(case: dict[str, object], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(case["w"], generator=generator)
    x = torch.randn((2, w.shape[0], *case["x"][2:]), generator=generator)
    stride, padding, dilation = case["stride"], case["padding"], case["dilation"]
    extra = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
    sizes = zip(x.shape[2:], stride, padding, dilation, w.shape[2:], strict=True)
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + 1 > 0 for n, s, p, d, k in sizes))
    moves = stride, padding, dilation, True, extra, case["groups"]

    expected = _aten.convolution(x, w, None, *moves)

    _close([convolution.convolution(x, w, None, *moves)], [expected])
    grad = torch.randn(expected.shape, generator=generator)
    rest = (grad, x, w, [expected.shape[1]], *moves, [True] * 3)
    _close(convolution.convolution_backward(*rest), _aten.convolution_backward(*rest))


@pytest.mark.parametrize("kernel", [2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_maximums_gradient_goes_to_the_first_of_equals(kernel: int, stride: int, dilation: int) -> None:
    x = torch.randint(0, 4, (2, 3, 9, 10), generator=torch.Generator().manual_seed(0)).float()
    moves = [kernel] * 2, [stride] * 2, [0, 0], [dilation] * 2
    expected, places = _aten.max_pool2d_with_indices(x, *moves)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))

    values, found = pooling.max_pool2d(x, *moves)

    _close([values], [expected])
    assert torch.equal(found, places)
    _close(
        [pooling.max_pool2d_backward(grad, x, *moves, False, places)],
        [_aten.max_pool2d_with_indices_backward(grad, x, *moves, False, places)],
    )


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_average_pooling_and_its_gradient_are_those_of_torch(stride: int) -> None:
    x = torch.randn(2, 3, 9, 10, generator=torch.Generator().manual_seed(0))
    expected = _aten.avg_pool2d(x, [2, 2], [stride] * 2)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    rest = (grad, x, [2, 2], [stride] * 2, [0, 0], False, True, None)

    _close([pooling.avg_pool2d(x, [2, 2], [stride] * 2)], [expected])
    _close([pooling.avg_pool2d_backward(*rest)], [_aten.avg_pool2d_backward(*rest)])


def test_windows_of_more_places_than_some_are_not_written_out() -> None:
    x = torch.randn(1, 2, 20, 20)
    assert [pooling._covered(x, pooling.PoolingWindows.of(2, [size, size])) for size in (8, 9, 20)] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.int64, torch.float32])
def test_products_along_an_axis_have_the_type_that_torch_gives_them(dtype: torch.dtype) -> None:
    x = (torch.arange(15).remainder(4) + 1).to(dtype)
    found, expected = arithmetic.cumprod(x, 0), torch.cumprod(x, 0)

    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(8, 5), (8, 5, 7), (4, 5, 6, 3)])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_and_its_gradient_are_those_of_torch(shape: tuple[int, ...], training: bool) -> None:
    torch.manual_seed(0)
    x, grad, weight, bias = torch.randn(shape) + 1, torch.randn(shape), torch.randn(5), torch.randn(5)
    mean, var = torch.randn(5), torch.rand(5) + 0.1
    made = _aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
    rest = (grad, x, weight, mean, var, made[1], made[2], training, 1e-5, [True] * 3)

    _close(normalization.batch_norm_backward(*rest), _aten.native_batch_norm_backward(*rest))
    if training:
        _close(normalization.batch_statistics_norm(x, weight, bias, True, 0.1, 1e-5), made)
    else:
        frozen = normalization.frozen_norm(x, weight, bias, mean, var, 0.1, 1e-5)
        _close(frozen[:1], _aten.native_batch_norm(x, weight, bias, mean, var, False, 0.1, 1e-5)[:1])


def test_the_variance_of_batch_norm_is_right_far_from_zero() -> None:
    x = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 1000
    y, _, rstd = normalization.batch_statistics_norm(x, None, None, True, 0.1, 0.0)

    expected = x.double().var((0, 2, 3), correction=0).rsqrt().float()

    torch.testing.assert_close(rstd, expected, rtol=1e-4, atol=0)
    assert float(y.abs().max()) < 10


@pytest.mark.parametrize("shape", [[8], [6, 8]])
def test_layer_norm_and_its_gradient_are_those_of_torch(shape: list[int]) -> None:
    torch.manual_seed(0)
    x, grad, weight, bias = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(shape), torch.randn(shape)
    made = _aten.native_layer_norm(x, shape, weight, bias, 1e-5)
    rest = (grad, x, shape, made[1], made[2], weight, bias, [True] * 3)

    _close(normalization.layer_norm(x, shape, weight, bias, 1e-5), made)
    _close(normalization.layer_norm_backward(*rest), _aten.native_layer_norm_backward(*rest))


ENTRIES = torch.cat(
    [
        torch.tensor([0.0, 1e-12, -1e-12, 1e-30, -1e-38, 6.0, -6.0, 40.0, -40.0]),
        torch.randn(500, generator=torch.Generator().manual_seed(0)) * 4,
    ]
)


@pytest.mark.parametrize(
    ("rule", "op", "arguments"),
    [
        (arithmetic.hardtanh_backward, _aten.hardtanh_backward, (0.0, 6.0)),
        (arithmetic.leaky_relu_backward, _aten.leaky_relu_backward, (0.1, False)),
        (arithmetic.gelu_backward, _aten.gelu_backward, ()),
    ],
)
def test_gradients_of_activations_are_torchs(rule: object, op: object, arguments: tuple[object, ...]) -> None:
    grad = torch.linspace(-1, 1, len(ENTRIES))

    found, expected = rule(grad, ENTRIES, *arguments), op(grad, ENTRIES, *arguments)  # type: ignore[operator]

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_softmax_row_that_is_masked_throughout_is_zero() -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    x[0], x[1, 2] = -float("inf"), -float("inf")

    _close([arithmetic.safe_softmax(x, -1)], [_aten._safe_softmax(x, -1)])


def test_rules_for_executorch_stand_in_front_of_those_for_onnx() -> None:
    both = table()

    assert all(both[op] is rule for op, rule in RULES.items())
    assert set(core_table()) - set(both) == {_aten.mm.default, _aten.addmm.default}
