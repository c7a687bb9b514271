"""FedBAT's graphs on each engine, for every kind of submodel, and a whole round on the device runtime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, prefixed
from edgefl.models.exits import with_exits
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog
from edgefl.wire.bundle.manifest import DataSpec
from edgefl_device.data import samples as local
from edgefl_export.compiler.request import blobs_to_fetch
from tests.invariants.fiarse.training import (
    BATCH,
    arrays_of,
    blobs_for,
    drawn_batches,
    small_net,
    train_on_device,
)
from tests.pairs import in_turn
from tests.parity.forms import checked
from tests.parity.rounds import local_data
from tests.support.arrays import as_tensors
from tests.support.bundles import build_bundle
from tests.support.reference import run_round

STEPS, SEED = 4, 3
OTHERS = {"granularity": "module", "momentum": 0.9, "weight_decay": 1e-3, "alpha_range": (5e-4, 5e-2)}


@pytest.mark.parametrize(
    ("kind", "submodel", "options", "form"),
    in_turn(
        [],
        rare=[
            ("output_side", {"cut": 1}, {}),
            ("width", {"ratio": 0.5, "scaler": True}, {"binarize_1d": False}),
            ("width", {"ratio": 0.5, "ordered": True}, OTHERS),
            ("importance", {"gamma": 0.4}, {"upload_mode": "last_forward"}),
            ("early_exit", {"exit": 1}, {"upload_mode": "det_sign"}),
            ("importance_structured", {"gamma": 0.5}, {"step_size": "largest", "phi": 0.25}),
        ],
    ),
)
def test_every_function_is_the_same_on_the_engine(
    kind: str, submodel: dict[str, Any], options: dict[str, Any], form: str
) -> None:
    spec = with_exits(small_net(), ["body"]) if kind == "early_exit" else small_net()
    objective = Objective.of(catalog.build(spec, kind, **submodel))
    algorithm = algorithms.build("fedbat", objective, batch=BATCH, steps=STEPS, **options)
    for function in (*(phase.function for phase in algorithm.phases), algorithm.finish):
        checked(form, function, 0)


@pytest.mark.slow
@pytest.mark.parametrize("form", in_turn([()]))
def test_a_round_on_the_device_is_the_round_in_torch(tmp_path: Path, form: str) -> None:
    spec = small_net()
    submodel = catalog.build(spec, "importance", gamma=0.4)
    algorithm = algorithms.build("fedbat", Objective.of(submodel), batch=BATCH, steps=STEPS)
    bundle = build_bundle(
        algorithm,
        blobs_to_fetch(submodel, "tier"),
        model=spec.name,
        data=DataSpec(shape=spec.sample.shape, dtype="float32", classes=spec.classes),
        format=form,
    )
    placement, data = submodel.place(arrays_of(spec), 1), local_data(spec, 16, seed=5)
    found = train_on_device(bundle, blobs_for(bundle, placement, arrays_of(spec)), data, SEED, tmp_path)

    batches = drawn_batches(data, SEED, STEPS)
    noise = _noise(algorithm.finish, STEPS + 1)
    finish = Function(
        "finish",
        lambda given: algorithm.finish.fn(given | noise),
        {name: port for name, port in algorithm.finish.inputs.items() if name not in noise},
    )
    payload = as_tensors(placement.payload)

    def feed(function: Function, step: int) -> Tensors:
        if not any(name.startswith("batch.") for name in function.inputs):
            return {}
        return prefixed("batch.0", dict(zip("xy", batches[step], strict=True))) | _noise(function, step)

    expected = run_round(replace(algorithm, finish=finish), payload, feed).update

    assert found.keys() == expected.keys()
    assert np.allclose(found["scales"], expected["scales"].numpy(), rtol=1e-3, atol=1e-7)
    flipped = np.unpackbits(found["codes"] ^ expected["codes"].numpy()).sum()
    assert flipped <= 0.01 * 8 * found["codes"].size


def _noise(function: Function, draw: int) -> Tensors:
    """What the device runtime draws for it."""
    ports = [name for name in function.inputs if name.startswith("noise.")]
    return {
        name: torch.from_numpy(local.noise(SEED, draw, number, function.inputs[name].shape, "float32"))
        for number, name in enumerate(ports)
    }
