"""A federation as objects and as text: the same thing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

import edgefl
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.config.text import dump
from edgefl.contract.algorithm import Algorithm
from edgefl.data.dataset import Dataset
from edgefl.objective.objective import Objective
from edgefl.setup.data import open_data
from edgefl.setup.model import federation_model
from edgefl.setup.training import tiers_of
from edgefl.wire import tensors
from edgefl_export.compiler.manifest import batch_size
from tests.support.errors import ConfigError, DataError, refuses


def own_model() -> nn.Module:
    """A factory at the top level of a file, as other processes load it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_objects_become_the_tables_that_say_the_same(tmp_path: Path) -> None:
    made = edgefl.federation(
        "mlp",
        rounds=3,
        seed=7,
        tiers={
            "strong": edgefl.Tier(count=2),
            "weak": edgefl.Tier(
                submodel=edgefl.submodels.OutputSide(cut=1), memory_budget="60%", activations="float16"
            ),
            "rare.one": edgefl.Tier(
                submodel=edgefl.submodels.Importance(gamma=0.25, min_keep=4), engine="executorch"
            ),
        },
        data="digits",
        training=edgefl.Training(
            algorithm=edgefl.algorithms.FedProx(mu=0.1, lr=0.05).personal(0.01),
            codec=edgefl.codecs.FedPAQ(bits=3),
            optimizer=edgefl.optimizers.FedAdam(lr=0.02),
        ),
        tables={"round": edgefl.config.RoundTable(min_reports=2)},
    )
    path = tmp_path / "federation.toml"
    path.write_text(dump(made))

    assert edgefl.load_federation(path) == made
    assert (made.tiers["weak"].cut, made.tiers["weak"].activations) == (1, "float16")
    assert (made.tiers["rare.one"].gamma, made.tiers["rare.one"].options) == (0.25, {"min_keep": 4})
    assert (made.algorithm.arguments["mu"], made.algorithm.personal) == (0.1, 0.01)
    assert (made.codec.options, made.optimizer.name) == ({"bits": 3}, "fedadam")
    assert "min_devices" not in made.round.model_fields_set  # the lab fills it in


def test_a_model_of_your_own_is_found_by_other_processes_in_its_file() -> None:
    made = edgefl.federation(own_model, data="digits", tiers={"whole": edgefl.Tier()})

    assert made.model.name == f"{Path(__file__).resolve()}:own_model"
    spec = federation_model(made, open_data(made))
    assert tiers_of(made, spec)["whole"].submodel.spec.units == ("0", "1")
    with refuses(ConfigError, factory=...):
        edgefl.federation(lambda: nn.Linear(1, 1))


def test_data_of_your_own_are_a_file_of_four_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (20, 8, 8), dtype=np.uint8), np.arange(20) % 4
    data = edgefl.data.Dataset.of(x, y, x[:5], y[:5], name="mine")
    path = data.save(tmp_path / "mine.npz")
    opened = open_data(edgefl.federation(data=path))

    assert (opened.name, opened.shape, opened.classes) == ("mine", (1, 8, 8), 4)
    assert abs(float(opened.read(opened.train_x).mean())) < 1e-4
    np.savez(tmp_path / "plain.npz", train_x=x, train_y=y, test_x=x, test_y=y)
    assert Dataset.load(tmp_path / "plain.npz").classes == 4


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train_x": np.zeros((2, 4, 4), np.uint8)}, "has no array 'train_y'"),
        (
            {name: np.array(["cat", "dog"]) for name in ("train_x", "train_y", "test_x", "test_y")},
            "labels are numbers, found",
        ),
    ],
    ids=["incomplete", "wrong types"],
)
def test_a_file_that_is_no_dataset(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "wrong.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message):
        Dataset.load(tmp_path / "wrong.npz")


def test_the_files_own_name_and_its_key_go_together() -> None:
    with pytest.raises(ConfigError, match="set the key file"):
        edgefl.load_federation(None, {"data.name": "file"})


def own_method(objective: Objective, *, batch: int = 6, steps: int = 3, lr: float = 0.1) -> Algorithm:
    return replace(sgd(objective, batch=batch, steps=steps, lr=lr), name="own_method")


def test_an_algorithm_in_a_file_has_its_own_batch_and_steps(tmp_path: Path) -> None:
    own = edgefl.federation(
        "mlp", data="digits", training=edgefl.Training(algorithm=edgefl.algorithms.own(own_method, lr=0.2))
    )
    assert (own.algorithm.batch, own.algorithm.steps) == (None, None)
    (tmp_path / "own.toml").write_text(dump(own))
    read = edgefl.load_federation(tmp_path / "own.toml")
    assert read == own

    (tier,) = tiers_of(read, federation_model(read, open_data(read))).values()
    assert (batch_size(tier.algorithm), tier.algorithm.phases[0].steps) == (6, 3)
    for name in ("sgd", "fedbat"):
        assert edgefl.federation(training=edgefl.Training(algorithm=name)).algorithm.arguments == {
            "batch": 32,
            "steps": 10,
        }
    assert edgefl.federation(
        training=edgefl.Training(algorithm=edgefl.algorithms.SGD(batch=5))
    ).algorithm.arguments == {"batch": 5, "steps": 10}


class Wide(nn.Module):
    """A model for images of 4 x 6, whose units have other names than its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def wide() -> nn.Module:
    return Wide()


def test_a_runs_model_loads_into_its_module(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (6, 1, 4, 6), dtype=np.uint8), np.arange(6) % 3
    data = edgefl.data.Dataset.of(x, y, x, y).save(tmp_path / "wide.npz")
    federation = edgefl.federation(wide, data=data)
    weights = federation_model(federation, edgefl.data.Dataset.load(data)).weights
    (tmp_path / "run.toml").write_text(dump(federation))
    arrays = {name: tensor.numpy() + 1 for name, tensor in weights.items()} | {
        "c/head.bias": np.zeros(3, np.float32)
    }
    (tmp_path / "model.safetensors").write_bytes(tensors.dump(arrays))

    run = edgefl.load_run(tmp_path)
    module = wide()
    module.load_state_dict(run.state_dict())
    assert np.array_equal(module.head.weight.detach().numpy(), run.model["head.weight"])
