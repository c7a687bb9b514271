"""Few rows by a large matrix are multiplied from the other side, others are not."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import pytest

from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import op_types, pointwise

SHAPES = {
    "few rows": ((32, 1024), (1024, 2048), 3),
    "many rows": ((128, 1024), (1024, 1024), 0),
    "a small matrix": ((32, 64), (64, 512), 0),
    "one row": ((1, 1024), (1024, 1024), 0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_product_is_the_same(name: str) -> None:
    left, right, transposes = SHAPES[name]
    function = pointwise(
        lambda t: {"metric.y": t["batch.x"] @ t["weights.w"]}, batch__x=left, weights__w=right
    )

    model = to_onnx(capture(function))

    assert op_types(model).count("Transpose") == transposes
    assert verify(function, model, 1).worst < 1e-5


def test_a_runtime_turns_no_large_matrix(tmp_path: Path) -> None:
    """It takes the transposed factor as it is, so that no copy of it is made."""
    left, right, _ = SHAPES["few rows"]
    function = pointwise(
        lambda t: {"metric.y": t["batch.x"] @ t["weights.w"]}, batch__x=left, weights__w=right
    )
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")

    ort.InferenceSession(to_onnx(capture(function)), options, providers=["CPUExecutionProvider"])

    kept = op_types((tmp_path / "optimized.onnx").read_bytes())
    assert "FusedMatMul" in kept and kept.count("Transpose") == 1
