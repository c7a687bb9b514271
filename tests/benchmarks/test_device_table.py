"""The phone table: what is timed, what must hold of it, and one graph timed on the device's engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import device_table
from benchmarks import graphs as device_graph
from benchmarks.device_table import EMBRACING, SGD, WIDTH
from edgefl import algorithms
from edgefl.contract.tensors import prefixed
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog
from edgefl_export.compiler.compiler import target_of

BATCH = 4


def test_both_methods_tiers_are_those_of_the_paper() -> None:
    found = device_table.submodels_of(build_model("resnet20"))

    counts = {
        key: sum(parameter.numel() for parameter in submodel.suffix.parameters())
        for key, submodel in found.items()
    }
    assert counts == {
        (EMBRACING, "strong"): 272_762,
        (EMBRACING, "moderate"): 257_994,
        (EMBRACING, "weak"): 206_346,
        (WIDTH, "moderate"): 52_874,
        (WIDTH, "weak"): 10_006,
    }


@pytest.mark.slow
def test_the_forward_pass_alone_is_that_of_the_step() -> None:
    submodel = device_table.submodels_of(build_model("resnet8"))[EMBRACING, "weak"]
    objective = Objective.of(submodel)
    step = algorithms.build("sgd", objective, batch=BATCH, **SGD).phases[0].function
    example = step.example(3)

    alone, whole = device_table.forward_only(objective, BATCH)(dict(example)), step(dict(example))

    assert torch.equal(alone["metric.loss"], whole["metric.loss"])
    moved = [name for name in alone if name.startswith("state.")]
    assert moved and all(torch.equal(alone[name], whole[name]) for name in moved)


@pytest.mark.slow
def test_a_graph_is_run_by_turns_without_torch(tmp_path: Path) -> None:
    submodel = catalog.build(build_model("mlp", hidden=[8]), "width", ratio=1.0)
    objective = Objective.of(submodel)
    algorithm = algorithms.build("sgd", objective, batch=BATCH, **SGD)
    weights = prefixed("weights", submodel.suffix.state_dict())
    left = {**weights, **algorithm.start(weights)}
    device_graph.write_job(
        tmp_path / "step", target_of("onnx"), algorithm.phases[0].function, left, algorithm.hyper
    )

    with device_graph.worker(tmp_path / "step", 1) as worker:
        worker.run(1, count=False)
        worker.run(3)

    assert len(worker.times) == 3 and min(worker.times) > 0
