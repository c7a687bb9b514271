"""The folder of a finished run, without the run: its configuration, its devices' data, and a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edgefl.config import parse
from edgefl.lab.lab import Lab
from edgefl.setup.data import open_data, partition
from edgefl.setup.model import federation_model
from edgefl.setup.tiers import completed
from edgefl.wire import tensors

Leave = Callable[..., Path]

TABLES: Mapping[str, object] = {
    "model": {"name": "mlp", "options": {"hidden": [16]}},
    "algorithm": {"batch": 8, "personal": 0.2, "momentum": 0.0},
    "data": {
        "name": "digits",
        "partition": "labels",
        "labels_per_device": 3,
        "train_samples": 240,
        "test_samples": 240,
    },
    "tiers": {"strong": {"count": 4}, "half": {"kind": "width", "gamma": 0.25, "count": 2}},
}


@pytest.fixture
def leave(tmp_path: Path) -> Leave:
    """Write a run that is done; keywords replace tables of the configuration."""

    def make(**tables: object) -> Path:
        federation = completed(parse({**TABLES, **tables}, source="the test"))
        dataset = open_data(federation)
        folder = tmp_path / "run"
        folder.mkdir()
        lab = Lab(federation, folder)
        lab.prepare(dataset, partition(federation, dataset, len(lab.devices)))
        weights = federation_model(federation, dataset).weights
        content = tensors.dump({name: tensor.numpy() for name, tensor in weights.items()})
        (folder / "model.safetensors").write_bytes(content)
        return folder

    return make
