"""Verification: a graph that disagrees with torch, or that the runtime refuses, never gets out."""

from __future__ import annotations

import pytest
import torch

from edgefl.programs.contract import Function, Tensors
from edgefl.wire.errors import ExportError
from exporters.capture import capture
from exporters.onnx import to_onnx
from exporters.verify import verify
from tests.exporters.examples import pointwise


def scaled(factor: float) -> Function:
    return pointwise(lambda t: {"update.w": t["state.w"] * factor}, state__w=(64,))


def test_report_holds_the_error_of_each_output() -> None:
    function = scaled(2.0)

    report = verify(function, to_onnx(capture(function)), 7)

    assert (report.function, report.seed, report.set_aside) == ("example", 7, ())
    assert list(report.errors) == ["update.w"] and report.worst < 1e-6


def test_wrong_result_names_function_output_error_and_tolerance() -> None:
    model = to_onnx(capture(scaled(2.0)))

    with pytest.raises(ExportError, match=r"'update\.w' of function 'example' differs from torch") as caught:
        verify(scaled(3.0), model, 0)

    details = caught.value.details
    assert details["output"] == "update.w"
    assert details["error"] > details["tolerance"] > 0  # type: ignore[operator]


def test_slightly_wrong_result_is_caught_on_every_example() -> None:
    model = to_onnx(capture(scaled(2.0)))

    with pytest.raises(ExportError, match="differs from torch"):
        verify(scaled(2.001), model, 0)


def test_an_example_on_a_kink_is_set_aside() -> None:
    def wobbly(t: Tensors) -> Tensors:
        first = torch.equal(t["state.w"], function.example(0)["state.w"])
        return {"update.w": t["state.w"] * (2.001 if first else 2.0)}

    function = pointwise(wobbly, state__w=(64,))

    report = verify(function, to_onnx(capture(scaled(2.0))), 0)

    assert report.seed == 1 and report.set_aside == (0,)


def test_nan_is_never_accepted() -> None:
    model = to_onnx(capture(pointwise(lambda t: {"update.w": t["state.w"].sqrt()}, state__w=(64,))))

    with pytest.raises(ExportError, match="differs from torch by nan"):
        verify(pointwise(lambda t: {"update.w": t["state.w"].abs().sqrt()}, state__w=(64,)), model, 0)


def test_other_shape_is_told() -> None:
    model = to_onnx(capture(scaled(2.0)))

    with pytest.raises(ExportError, match=r"float32\[64\] in onnxruntime and float32\[8, 8\] in torch"):
        verify(pointwise(lambda t: {"update.w": t["state.w"].view(8, 8)}, state__w=(64,)), model, 0)


def test_missing_output_is_told() -> None:
    model = to_onnx(capture(scaled(2.0)))

    with pytest.raises(ExportError, match="has 1 outputs"):
        verify(
            pointwise(lambda t: {"update.w": t["state.w"], "carry.w": t["state.w"]}, state__w=(64,)), model, 0
        )


def test_damaged_bytes_are_told() -> None:
    with pytest.raises(ExportError, match=r"onnxruntime .* cannot load the graph of function 'example'"):
        verify(scaled(2.0), b"not a model", 0)
