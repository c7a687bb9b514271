"""Samples of several magnitudes show what usual samples hide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ExportError
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify

FLOATS, WHOLE = TensorSpec((8, 4)), TensorSpec((8, 4), torch.int64)


def function(fn: Callable[[Tensor], Tensor], spec: TensorSpec) -> Function:
    return Function("example", lambda t: {"metric.y": fn(t["batch.0.x"])}, {"batch.0.x": spec})


def verified(
    right: Callable[[Tensor], Tensor], exported: Callable[[Tensor], Tensor], spec: TensorSpec
) -> None:
    verify(function(right, spec), to_onnx(capture(function(exported, spec))), 3)


def test_an_overflow_at_a_wide_spread_is_seen() -> None:
    with pytest.raises(ExportError, match="several magnitudes"):
        verified(lambda x: x.logcumsumexp(1), lambda x: x.exp().cumsum(1).log(), FLOATS)


def test_the_sign_of_a_negative_remainder_is_seen() -> None:
    with pytest.raises(ExportError, match="several magnitudes"):
        verified(lambda x: x % 3, lambda x: torch.fmod(x, 3), WHOLE)


def test_whole_numbers_beyond_those_of_float32_are_seen() -> None:
    with pytest.raises(ExportError, match="several magnitudes"):
        verified(lambda x: x // 7, lambda x: (x / 7).floor().long(), WHOLE)


def test_positions_keep_their_usual_draw() -> None:
    table = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))

    verified(lambda x: torch.nn.functional.embedding(x, table), lambda x: table[x], WHOLE)


def test_labels_and_tokens_have_no_wide_example() -> None:
    assert function(lambda x: x, TensorSpec((8,), torch.int64, below=5)).wide_example(0) is None


def test_a_wide_example_has_rows_of_several_magnitudes() -> None:
    floats = function(lambda x: x, FLOATS).wide_example(0)
    whole = function(lambda x: x, WHOLE).wide_example(0)

    assert floats is not None and whole is not None
    sizes = floats["batch.0.x"].abs().mean(1)
    assert sizes.max() > 20 and sizes.min() < 0.5
    assert whole["batch.0.x"].min() < -1000 and whole["batch.0.x"].max() > 2**24
