"""`output`: which of the things that a user's model returns is its output, wherever a model is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import edgefl
from edgefl.api.model import model_spec
from edgefl.config import load
from edgefl.config.reading import checked
from edgefl.errors import ConfigError
from edgefl.setup.data import open_data
from edgefl.setup.model import federation_model

MODEL = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.start, self.end = nn.Linear(64, 8), nn.Linear(8, 10), nn.Linear(8, 10)

    def forward(self, x):
        x = self.hidden(x.flatten(1)).relu()
        return {"start": self.start(x), "end": self.end(x)}


def make():
    return Net()


def choosing(output):
    return Net().start if output == 3 else Net()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("output") / "answers.py"
    file.write_text(MODEL)
    return f"{file}:make"


def test_a_federation_names_the_output(model: str, tmp_path: Path) -> None:
    made = edgefl.federation(edgefl.Model(model, output="end"), data="digits")
    assert made.model.output == "end"
    file = tmp_path / "federation.toml"
    file.write_text(f'[model]\nname = "{model}"\noutput = "end"\n[data]\nname = "digits"\n')
    for federation in (made, load(file)):
        spec = federation_model(federation, open_data(federation))
        assert spec.units == ("hidden", "end")
    assert edgefl.federation(model, data="digits").model.output is None


def test_a_call_names_the_output_of_a_file_a_factory_and_a_module(model: str) -> None:
    assert model_spec(model, sample=(64,), classes=10, output=1).units == ("hidden", "end")
    assert model_spec(model, sample=(64,), classes=10).units == ("hidden", "start")

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, self.dense(x)

    for each in (Twice, Twice()):
        assert model_spec(each, sample=(4,), classes=3, output=1).units == ("dense",)


def test_a_factory_that_asks_for_an_output_gets_it_for_itself(model: str) -> None:
    own = model.replace(":make", ":choosing")
    spec = model_spec(own, sample=(8,), classes=10, options={"output": 3})
    assert [tuple(tensor.shape) for tensor in spec.weights.values()] == [(10, 8), (10,)]


def test_an_output_without_effect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="argument `output` has no effect here: model 'mlp' returns one tensor"
    ):
        model_spec("mlp", output="logits")
    file = tmp_path / "federation.toml"
    file.write_text('[model]\nname = "mlp"\noutput = "logits"\n')
    with pytest.raises(ConfigError, match=r"model\.output: model 'mlp' returns one tensor"):
        checked(file)


@pytest.mark.slow
def test_checking_and_planning_take_the_output_that_training_would(model: str) -> None:
    made = edgefl.Model(model, sample=(64,), classes=10, output="end")
    assert edgefl.check(made, engines=["onnx"]).units == ("hidden", "end")
    fit = edgefl.plan(made, kinds=["output_side"])
    assert {offer.size for offer in fit.offers} == {
        offer.size
        for offer in edgefl.plan(edgefl.Model(model, sample=(64,), classes=10), kinds=["output_side"]).offers
    }
