"""What is handed to onnxsim."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from benchmarks.train_step.eager import built
from benchmarks.train_step.onnxsim_training import prepare


def test_the_graph_is_the_loss_with_its_parameters_by_name(tmp_path: Path) -> None:
    prepare(tmp_path, built("mlp", {"size": 4}, "strong"), 2)

    graph = onnx.load(tmp_path / "loss.onnx").graph
    names = json.loads((tmp_path / "trained.json").read_text())
    assert {*names} == {each.name for each in graph.initializer} and names
    assert [each.name for each in graph.input] == ["x", "y"] and [each.name for each in graph.output] == [
        "loss"
    ]


def test_torchs_failed_exports_are_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="dropout in training mode"):
        prepare(tmp_path, built("lstm_lm", {}, "strong"), 2)

    assert capfd.readouterr().out == ""
