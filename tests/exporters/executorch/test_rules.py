"""The rules for ExecuTorch give what torch gives: each beside the op that it rewrites."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from edgefl_export.decompositions import core_table
from edgefl_export.executorch.rules import (
    RULES,
    arithmetic,
    convolution,
    normalization,
    pooling,
    table,
)

_aten = torch.ops.aten
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
    assert [pooling._covered(x, pooling.Windows.of(2, [size, size])) for size in (8, 9, 20)] == [
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
