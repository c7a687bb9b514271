"""Accuracy of models with norm layers: reported, deployed, and with statistics recomputed by torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.api.deploy import deploy
from edgefl.api.simulate import prepare_simulation
from edgefl.config import Federation, parse
from edgefl.data.dataset import Dataset
from edgefl.lab.deployment import DeploymentBuilder
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.tensors import Arrays
from tests.support.arrays import as_tensors

WIDTH = {"half": {"kind": "width", "gamma": 0.25, "count": 2}}
IMPORTANCE = {
    "quarter": {"kind": "importance", "gamma": 0.25, "count": 2},
    "small": {"kind": "importance", "gamma": 0.1, "count": 1},
}
WEAK = {"weak": {"cut": 2, "count": 1}, "weakest": {"cut": 6, "count": 1}}


class Functional(nn.Module):
    """A batch norm that is no module of torch's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.momentum: float | None = 0.1
        self.scale = nn.Parameter(torch.ones(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.mean, self.variance, self.scale, None, self.training, self.momentum or 1.0
        )


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "static": lambda channels: nn.BatchNorm2d(channels, track_running_stats=False),
    "functional": Functional,
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True, track_running_stats=True),
    "group": lambda channels: nn.GroupNorm(2, channels),
    "none": lambda channels: nn.Identity(),
}


def network(norm: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 8, 3, 2, 1), NORMS[norm](8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), NORMS[norm](8))
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(32, 10))


def federation(norm: str, tiers: dict[str, object], path: Path, **algorithm: object) -> Federation:
    path.mkdir(exist_ok=True)
    source = path / "own.py"
    source.write_text(f"from {__name__} import network\n\ndef make():\n    return network({norm!r})\n")
    tables = {
        "federation": {"name": "norms", "rounds": 4, "seed": 1},
        "model": {"name": f"{source}:make"},
        "algorithm": {"batch": 16, "steps": 6, "lr": 0.2, **algorithm},
        "data": {"name": "digits", "train_samples": 300, "test_samples": 200, "partition": "iid"},
        "tiers": {"full": {"count": 1}, **tiers},
    }
    return parse(tables, source="the test")


def by_hand(norm: str, dataset: Dataset, weights: Arrays, *, estimated: bool) -> float:
    """Return the accuracy of torch's own module; with ``estimated`` its statistics are cumulative averages."""
    module = network("batch" if norm == "static" else norm)
    module.load_state_dict(as_tensors(weights), strict=False)
    with torch.no_grad():
        if estimated:  # as HeteroFL asks the whole training data once
            for place in (1, 4):
                module[place].momentum = 1.0  # all rows are one batch
            module.train()(torch.from_numpy(dataset.train_batch(np.arange(len(dataset.train_y)))["x"]))
        logits = module.eval()(torch.from_numpy(dataset.read(dataset.test_x)))
    return float((logits.argmax(1).numpy() == dataset.test_y).mean())


@pytest.mark.parametrize(
    ("norm", "tiers", "estimated"),
    [
        ("batch", WEAK, False),
        pytest.param("batch", WIDTH, True, marks=pytest.mark.slow),
        pytest.param("batch", IMPORTANCE, True, marks=pytest.mark.slow),
        ("batch", WIDTH | IMPORTANCE | WEAK, True),
        pytest.param("instance", IMPORTANCE, True, marks=pytest.mark.slow),
        pytest.param("functional", WIDTH | WEAK, True, marks=pytest.mark.slow),
        ("static", {}, True),
        pytest.param("group", WIDTH | IMPORTANCE, False, marks=pytest.mark.slow),
        pytest.param("none", IMPORTANCE | WEAK, False, marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value) or "full" if isinstance(value, dict) else str(value),
)
def test_reported_deployed_and_recomputed_accuracy_agree(
    norm: str, tiers: dict[str, object], estimated: bool, tmp_path: Path
) -> None:
    made = federation(norm, tiers, tmp_path)
    prepared = prepare_simulation(made, tmp_path / "out", device="cpu")
    done = prepared.run()
    builder = DeploymentBuilder.of(done.federation, prepared.dataset, done.model)
    deployed = builder.score(builder.module(OutputSide(builder.spec, 0)))

    reported = done.history[-1].accuracy
    assert reported == pytest.approx(deployed, abs=0.005)
    right = by_hand(norm, prepared.dataset, done.model, estimated=estimated)
    assert reported == pytest.approx(right, abs=0.01)
    assert right > 0.3, "the model learned something that bad statistics would lose"


def largest(weight: Tensor) -> Tensor:
    least = weight.abs().flatten().topk(math.ceil(0.4 * weight.numel())).values[-1]
    return torch.where(weight.abs() >= least, weight, 0.0)


def signs(weight: Tensor) -> Tensor:
    return torch.where(weight >= 0, weight.abs().mean(), -weight.abs().mean())


@pytest.mark.parametrize(
    ("algorithm", "tiers", "form"),
    [
        ({"name": "swat", "sparsity": 0.6}, {}, largest),
        pytest.param({"name": "binary"}, WIDTH, signs, marks=pytest.mark.slow),
    ],
    ids=["swat", "binary-width"],
)
def test_what_is_deployed_has_the_form_whose_accuracy_is_reported(
    algorithm: dict[str, object], tiers: dict[str, object], form: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    prepared = prepare_simulation(
        federation("batch", tiers, tmp_path, **algorithm), tmp_path / "out", device="cpu"
    )
    done = prepared.run()

    deployed = deploy(done.folder)

    reported = done.history[-1].accuracy
    assert reported == pytest.approx(deployed.facts["accuracy"], abs=0.005)
    weights = {
        name: form(torch.from_numpy(array)).numpy() if array.ndim > 1 else array
        for name, array in done.model.items()
    }
    right = by_hand("batch", prepared.dataset, weights, estimated=bool(tiers))
    assert reported == pytest.approx(right, abs=0.01)
    read = DeploymentBuilder.of(done.federation, prepared.dataset, done.model).whole
    np.testing.assert_allclose(read["0.weight"], weights["0.weight"], rtol=1e-6)
    assert right > 0.3
