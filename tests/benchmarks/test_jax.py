"""What is handed to JAX is the model's forward pass; where an environment with JAX was made, it trains as torch does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from benchmarks import peers
from benchmarks.machine import import_path
from benchmarks.torch_layers import to_torch_layers
from benchmarks.train_step import jax_training
from benchmarks.train_step.baselines import FIRST
from benchmarks.train_step.eager import built, optimizer, stepper
from benchmarks.train_step.jax_graph import OPS, prepare
from benchmarks.train_step.onnxsim_training import prepare as onnxsim_prepare
from edgefl.errors import ExportError
from edgefl.models.losses.as_torch import loss_as_torch

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
TRAIN = """
import sys
from pathlib import Path

import numpy as np

from benchmarks.train_step.jax_training import load

folder = Path(sys.argv[1])
step = load(folder)
losses = [step() for _ in range(int(sys.argv[2]))]
state = next(cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, tuple))
values = {name: np.asarray(each) for name, each in {**state[0], **state[2]}.items()}
np.savez(folder / "trained.npz", losses=losses, **values)
"""


def test_a_forward_pass_is_told_in_calls_and_values(tmp_path: Path) -> None:
    submodel = built("resnet8", {"size": 8}, "strong")

    prepare(tmp_path, submodel, 2)

    graph = json.loads((tmp_path / "forward.json").read_text())
    first, norm = graph["calls"][:2]
    assert first["op"] == "conv2d.default" and first["arguments"]["input"] == {"tensor": "x"}
    assert first["arguments"]["weight"]["tensor"] in graph["trained"] and first["arguments"]["groups"] == 1
    assert norm["arguments"]["input"] == {"tensor": first["name"]} and norm["arguments"]["training"] is True
    assert graph["output"] == graph["calls"][-1]["name"]
    with np.load(tmp_path / "forward.npz") as file:
        for name, value in to_torch_layers(submodel.suffix).state_dict().items():
            np.testing.assert_array_equal(file[name], value.numpy())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "why"), [("vit", r"aten\.\w+\.\w+ is not translated"), ("bilstm", "only plain cross entropy")]
)
def test_what_is_not_translated_is_told(model: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=why):
        prepare(tmp_path, built(model, {}, "strong"), 2)


def test_every_layer_that_is_handed_over_is_known_there() -> None:
    assert {*jax_training.OPS, "batch_norm.default"} == OPS


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet8", "cnn"])
def test_jax_trains_the_same_model(model: str, tmp_path: Path) -> None:
    python = peers.interpreter(peers.peers()["jax"])
    if python is None:
        pytest.skip("there is no environment with JAX; `python -m benchmarks peer jax` makes one")
    submodel = built(model, {"size": 8}, "strong")
    numbers = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn((4, *submodel.boundary.shape), generator=numbers), torch.arange(4)) for _ in range(2)
    ]
    (tmp_path / "job.json").write_text(json.dumps({"sgd": SGD}))
    for number, (x, y) in enumerate(batches):
        np.savez(tmp_path / f"batch{number}.npz", **{"batch.0.x": x.numpy(), "batch.0.y": y.numpy()})  # type: ignore[arg-type]
    prepare(tmp_path, submodel, 4)

    with import_path() as path:
        environment = {**os.environ, **jax_training.environment(1), "PYTHONPATH": str(path)}
        command = [python, "-c", TRAIN, str(tmp_path), str(FIRST)]
        subprocess.run(command, check=True, timeout=300, env=environment)

    module = to_torch_layers(submodel.suffix)
    step = stepper(module, loss_as_torch(submodel.spec.loss), optimizer(module, **SGD), batches)
    with np.load(tmp_path / "trained.npz") as found:
        np.testing.assert_allclose(found["losses"], [step() for _ in range(FIRST)], rtol=1e-5)
        for name, value in module.state_dict().items():
            if not name.endswith("num_batches_tracked"):
                wanted = jax_training.placed(value.numpy(), (2, 3, 1, 0))
                np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-5)


# -- what is handed to onnxsim -----------------------------------------------------------------------------


def test_the_graph_is_the_loss_with_its_parameters_by_name(tmp_path: Path) -> None:
    onnxsim_prepare(tmp_path, built("mlp", {"size": 4}, "strong"), 2)

    graph = onnx.load(tmp_path / "loss.onnx").graph
    names = json.loads((tmp_path / "trained.json").read_text())
    assert {*names} == {each.name for each in graph.initializer} and names
    assert [each.name for each in graph.input] == ["x", "y"] and [each.name for each in graph.output] == [
        "loss"
    ]


def test_torchs_failed_exports_are_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="dropout in training mode"):
        onnxsim_prepare(tmp_path, built("lstm_lm", {}, "strong"), 2)

    assert capfd.readouterr().out == ""
