"""Rounds of personal layers on the device runtime: equal to torch over two rounds, and no private byte in an update."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl.algorithms import build
from edgefl.codecs import catalog as codecs
from edgefl.codecs.apply import apply_codec
from edgefl.contract.algorithm import Function
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.tensors import Arrays
from edgefl_device.data.samples import Batches, LabelSpec
from tests.pairs import in_turn
from tests.parity.forms import engine_of
from tests.parity.rounds import by_unit, device_round, local_data
from tests.support.bundles import build_bundle
from tests.support.reference import run_round

MARKER = np.frombuffer(b"ZZZ?", np.float32)[0]
"""A number around 0.85 whose bytes nothing else has."""


@pytest.mark.parametrize(
    ("name", "codec", "form"),
    in_turn([("fedrep", "dense"), ("fedbn", "dense"), ("fedper", "int8")], rare=[("fedper", "dense")]),
)
def test_two_rounds_on_a_device_equal_torch(tmp_path: Path, name: str, codec: str, form: str) -> None:
    spec = build_model("fedbat_cnn", size=4, widths=(2, 4), classes=3, seed=1)
    objective = Objective.of(OutputSide(spec, 0))
    options = {"head_steps": 3} if name == "fedrep" else {}
    plain = build(name, objective, batch=4, steps=2, lr=0.05, **options)
    algorithm = apply_codec(codecs.build(codec), plain, objective)
    units = tuple(unit for unit, _ in spec.module.named_children())
    shape = DataSpec(shape=spec.sample.shape, dtype="float32", classes=spec.classes)
    bundle = build_bundle(algorithm, units, model=spec.name, data=shape, format=form)
    assert bundle.manifest.carry_any_tier is True
    data = local_data(spec, 9, seed=5).fitted(bundle.manifest.data, LabelSpec.of(bundle.manifest))
    initial = {key: tensor.numpy() for key, tensor in spec.weights.items()}
    batches = Batches(11, len(data), bundle.manifest.batch)

    def feed(function: Function, step: int) -> dict[str, Tensor]:
        rows = batches.indices(0, step)
        return {"batch.0.x": torch.from_numpy(data.rows(rows)), "batch.0.y": torch.from_numpy(data.y[rows])}

    kept: Arrays = {}
    carry: dict[str, Tensor] = {}
    for _ in range(2):
        made = device_round(bundle, by_unit(initial, units), engine_of(form), tmp_path, seed=11)
        result = made.run(data, kept)
        # Of the dense update, because rounding to codes may differ by one where torch and the engine differ slightly.
        expected = run_round(plain, spec.weights, feed, carry=carry)
        for own, reference in ((result.carry, expected.carry), (result.update, expected.update)):
            for key, value in reference.items() if codec == "dense" or own is result.carry else ():
                scale = max(1e-3, float(value.abs().max()))
                assert np.abs(own[key] - value.numpy()).max() <= 1e-4 * scale, key
        assert result.carry.keys() == expected.carry.keys()
        assert not algorithm.private & result.update.keys()
        kept, carry = result.carry, dict(expected.carry)


@pytest.mark.parametrize(
    ("name", "codec", "form"),
    in_turn([("fedper", "dense"), ("fedrep", "dense"), ("fedbn", "int8")], rare=[("fedper", "topk")]),
)
def test_a_marker_in_private_tensors_is_in_no_byte_of_an_update(
    tmp_path: Path, name: str, codec: str, form: str
) -> None:
    """Without a learning rate the marker stays in the parameters over the whole round."""
    spec = build_model("fedbat_cnn", size=4, widths=(2, 4), classes=3, seed=1)
    objective = Objective.of(OutputSide(spec, 0))
    algorithm = apply_codec(codecs.build(codec), build(name, objective, batch=4, steps=1, lr=0.0), objective)
    units = tuple(unit for unit, _ in spec.module.named_children())
    shape = DataSpec(shape=spec.sample.shape, dtype="float32", classes=spec.classes)
    bundle = build_bundle(algorithm, units, model=spec.name, data=shape, format=form)
    data = local_data(spec, 9, seed=5).fitted(bundle.manifest.data, LabelSpec.of(bundle.manifest))
    planted = {f"private.{key}": np.full(spec.weights[key].shape, MARKER) for key in algorithm.private}
    contents = by_unit({key: tensor.numpy() for key, tensor in spec.weights.items()}, units)

    result = device_round(bundle, contents, engine_of(form), tmp_path, seed=11).run(
        data, planted | {"begun": np.ones((), np.float32)}
    )

    parameters = [key for key in algorithm.private if "running" not in key]
    assert all((result.carry[f"private.{key}"] == MARKER).all() for key in parameters)
    assert MARKER.tobytes() in tensors.dump(result.carry)
    assert MARKER.tobytes() not in tensors.dump(result.update, result.masks)
