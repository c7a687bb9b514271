"""One verdict on a model: traced, cut, exported, run by each engine and compared with torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import edgefl
from edgefl.api.check import Verdict
from edgefl.cli.commands import app
from edgefl.errors import DataError
from tests.cli.runner import runner
from tests.models.test_inputs import CLASSES, TEXT, reader

STEERS = """
from torch import nn

class Steers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x if x.sum() > 0 else -x)

def make():
    return Steers()

def plain():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(STEERS)
    return path


@pytest.mark.slow
def test_a_model_that_both_engines_train() -> None:
    verdict = edgefl.check(edgefl.Model(reader(), sample=TEXT, classes=CLASSES), batch=4)

    assert verdict.ok and str(verdict) == "reader can be trained on onnx and executorch, 4 units"
    assert (verdict.inputs, verdict.loss) == (("x", "attention_mask"), "CrossEntropy")
    assert all(0 < each.max_rel_error < 1e-4 and each.step_ms > 0 for each in verdict.engines)


@pytest.mark.slow
def test_a_small_gpt_is_trained_by_both() -> None:
    assert edgefl.check(edgefl.Model("gpt", options={"length": 8, "width": 16, "depth": 2}), batch=4).ok


def test_what_stands_in_the_way_is_said_with_the_line_of_the_users_code(own: Path) -> None:
    ran = runner().invoke(
        app, ["check", f"{own}:make", "--option", "classes=2", "--option", "sample_shape=[4]"]
    )

    assert ran.exit_code == 1
    assert "cannot be trained: cannot trace Steers" in ran.stdout and f"{own}:10" in ran.stdout
    assert "torch.where" in ran.stdout


def test_the_data_of_a_device_say_what_the_model_is_for(own: Path, tmp_path: Path) -> None:
    rate = np.float32(8)  # no input: it has no row for each sample
    np.savez(tmp_path / "mine.npz", x=np.ones((9, 4), np.float32), y=np.arange(9) % 2, rate=rate)
    arguments = ["check", f"{own}:plain", "--data", str(tmp_path / "mine.npz"), "--engine", "onnx", "--json"]
    told = json.loads(runner().invoke(app, arguments).stdout)

    assert told["ok"] and told["units"] == ["0", "1", "2"]
    assert [each["engine"] for each in told["engines"]] == ["onnx"]
    with pytest.raises(DataError, match="is no training data"):
        edgefl.check(f"{own}:plain", data=tmp_path)


def test_an_engine_that_cannot_says_so_beside_the_others() -> None:
    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).cummax(1).values

    verdict = edgefl.check(edgefl.Model(Largest(), sample=(4,), classes=4), engines=["onnx"])
    assert not verdict.ok
    told = "largest can be trained on no engine, 1 units; not on onnx: op aten.cummax.default"
    assert str(verdict).startswith(told)


def test_an_op_that_no_engine_has_is_refused_for_all() -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(self.layer(x).unflatten(1, (2, 2)) + 3 * torch.eye(2)).flatten(1)

    verdict = edgefl.check(edgefl.Model(Inverse(), sample=(4,), classes=4), engines=["onnx"])
    assert not verdict.ok and not verdict.engines
    assert "Inverse cannot be trained: op aten.linalg_inv_ex.default" in str(verdict)
    assert "has no form for any engine" in verdict.problem and Path(__file__).name in verdict.problem


def test_a_module_is_compared_with_its_units_and_timed_in_torch() -> None:
    verdicts: list[Verdict] = []
    verdict = edgefl.check(
        edgefl.Model(reader(), sample=TEXT, classes=CLASSES),
        batch=4,
        engines=["onnx"],
        so_far=verdicts.append,
    )

    assert verdict.torch_ms > 0 and verdicts == [verdict]
    assert edgefl.check("mlp", engines=["onnx"]).torch_ms == 0


def test_units_that_compute_something_else_than_the_module_are_no_success() -> None:
    class Switching(nn.Module):
        """One that is not the same after it was copied."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def __deepcopy__(self, memo: dict[int, object]) -> Switching:
            return Switching()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    verdict = edgefl.check(edgefl.Model(Switching(), sample=(4,), classes=3), engines=["onnx"])
    assert not verdict.ok
    assert "Switching would not be trained as torch trains it: after three steps" in verdict.problem
    assert "submodule 'layer' (Linear)" in verdict.problem


def test_a_module_that_fails_in_torch_says_so() -> None:
    verdict = edgefl.check(
        edgefl.Model(
            nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)),
            sample=edgefl.submodels.TensorSpec((2,), torch.int64, 9),
            classes=3,
        ),
        engines=["onnx"],
    )
    assert "Sequential fails in torch on random samples: IndexError: index out of range" in verdict.problem
