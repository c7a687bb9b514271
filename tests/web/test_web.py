"""The exported training steps in onnxruntime-web, beside torch and beside the device's engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ExportError
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_export.capture.trace import capture
from edgefl_export.memory.budget import within_onnx
from edgefl_export.memory.recompute import Budget
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import compare
from tests.web import node

pytestmark = pytest.mark.slow

BATCH = 4


@pytest.fixture(scope="module", autouse=True)
def _node() -> None:
    node.require_node()


class Transformer(nn.Module):
    """Patches of 4 numbers -> two encoder layers -> the mean token's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embed(x)).mean(dim=1))
        return out


def transformer() -> ModelSpec:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return split(Transformer(), (), sample=TensorSpec((6, 4)), classes=5, name="transformer")


def zoo_model(name: str, cut: int = 0, **options: object) -> Callable[[], OutputSide]:
    return lambda: OutputSide(build_model(name, **options), cut)


MODELS: dict[str, Callable[[], OutputSide]] = {
    "resnet8, strong": zoo_model("resnet8", widths=[4, 8, 16], size=16),
    "resnet8, weak": zoo_model("resnet8", cut=3),
    "cnn": zoo_model("cnn", size=12, classes=10),
    "mlp": zoo_model("mlp", size=8),
    "bilstm": zoo_model("bilstm", length=6, vocabulary=30, features=5, hidden=4),
    "lstm_lm": zoo_model("lstm_lm", length=5, vocabulary=20, features=6, hidden=4),
    "transformer": lambda: OutputSide(transformer(), 0),
    "mobilenet": zoo_model("mobilenet", cut=15, width=0.125, size=64),
    "convnext": zoo_model("convnext", widths=[4, 8, 8, 16], depths=[1, 1, 2, 1], size=16),
    "vit": zoo_model("vit", width=12, depth=2, size=8),
}


def step_of(submodel: OutputSide) -> Function:
    return algorithms.build("sgd", Objective.of(submodel), batch=BATCH).phases[0].function


@pytest.mark.parametrize("model", MODELS)
def test_the_exported_step_in_webassembly_equals_torch(model: str, tmp_path: Path) -> None:
    step = step_of(MODELS[model]())

    report = compare(step, node.runtime(to_onnx(capture(step)), tmp_path), seed=3)

    assert set(report.errors) >= {"metric.loss", *(name for name in step.inputs if name[:5] == "state")}
    assert report.worst <= 1e-4


def test_a_step_within_a_memory_budget_in_webassembly_equals_torch(tmp_path: Path) -> None:
    layers = [
        nn.Sequential(nn.Conv2d(3 if first else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())
        for first in (1, 0, 0, 0)
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    submodel = OutputSide(split(model, sample=TensorSpec((3, 32, 32)), classes=5), 0)
    step = algorithms.build("sgd", Objective.of(submodel), batch=16).phases[0].function
    plain = capture(step)
    (tight,), _ = within_onnx(plain, Budget(0.8, relative=True))
    assert len(tight.module.graph.nodes) > len(plain.module.graph.nodes), "nothing is computed twice"

    report = compare(step, node.runtime(to_onnx(tight), tmp_path), seed=3)

    assert report.worst <= 1e-4


def test_a_wrong_graph_is_caught_in_webassembly(tmp_path: Path) -> None:
    right, wrong = (
        algorithms.build("sgd", Objective.of(MODELS["mlp"]()), batch=BATCH, momentum=momentum)
        for momentum in (0.9, 0.5)
    )
    model = to_onnx(capture(wrong.phases[0].function))

    with pytest.raises(ExportError, match="differs from torch"):
        compare(right.phases[0].function, node.runtime(model, tmp_path), seed=3)


def test_several_steps_in_webassembly_train_as_on_the_device(tmp_path: Path) -> None:
    step = step_of(MODELS["mlp"]())
    captured = capture(step)
    model = to_onnx(captured)
    feeds = {name: value.numpy() for name, value in step.example(1).items()}

    ran = node.run(model, feeds, tmp_path, steps=5)

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    losses = []
    for _ in range(5):
        expected = dict(zip(captured.outputs, session.run(None, feeds), strict=True))
        losses.append(float(expected["metric.loss"]))
        feeds |= {name: value for name, value in expected.items() if name in feeds}
    assert losses[-1] < losses[0] and len(ran.step_ms) == 5
    for name, found in zip(expected, ran.outputs, strict=True):
        scale = np.abs(expected[name]).max()
        assert np.abs(found - expected[name]).max() <= 1e-4 * scale + 1e-6, name
