"""Updates of large state in blocks of rows: the same bits, in the memory of the whole."""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from device_runtime.engine.executorch import ExecuTorchEngine
from device_runtime.engine.executorch.binding import Program as Loaded
from device_runtime.engine.executorch.places import places
from device_runtime.round.tuning import fastest
from edgefl.contract.program import Program
from edgefl.contract.tensors import TensorSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.programs import catalog
from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.bundle.rows import rows_in
from edgefl.wire.bundle.variants import folded, unfolded
from edgefl.wire.errors import BundleError
from edgefl.wire.limits import Limits
from edgefl.wire.tensors import Array, Arrays
from exporters.artifact import Artifact
from exporters.bundle.build import ports
from exporters.bundle.formats import ROWS, format_of
from exporters.capture.trace import Captured
from exporters.executorch.check.ports import read_ports
from exporters.executorch.program import rows
from exporters.executorch.program.write import in_rows, to_executorch

WIDE, BATCH, STEPS = 1024, 4, 3
STEP = rows.BLOCK_BYTES // 4 // WIDE
LARGE = "state.weights.body.0.weight"
PROGRAMS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9, "weight_decay": 1e-3}, "adamw": {}}
ENGINE = ExecuTorchEngine()


@functools.cache
def captured(name: str, width: int = WIDE) -> tuple[Program, Captured]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        net = nn.Sequential(OrderedDict(body=body, head=nn.Linear(width, 4)))
        spec = split(net, sample=TensorSpec((width,)), classes=4)
    program = catalog.build(name, Objective(spec.module, spec.sample), batch=BATCH, **PROGRAMS[name])
    return program, format_of("executorch").capture(program.phases[0].function)


@functools.cache
def written(name: str) -> tuple[Artifact, bytes, Graph, bytes]:
    """The artifact, its form by rows, the entry of a manifest with both, and how the form travels."""
    program, graph = captured(name)
    form = format_of("executorch")
    artifact = form.write(graph)
    verified = form.verify(program.phases[0].function, artifact.model, 0, artifact.in_place)
    other = form.variants(graph, artifact, verified)[ROWS]
    variant, frame = folded(ROWS, other, 1 << 17, base=artifact.model)
    entry = Graph(
        name="train",
        format="executorch",
        blob=describe(artifact.model, 1 << 17),
        inputs=ports(graph.inputs),
        outputs=ports(graph.outputs),
        in_place=artifact.in_place,
        planned_bytes=artifact.planned_bytes,
        variants=(variant,),
    )
    return artifact, other, entry, frame


def example(name: str) -> Arrays:
    return {port: value.numpy() for port, value in captured(name)[0].phases[0].function.example(0).items()}


def trained(name: str, graph: Graph, model: bytes) -> tuple[Arrays, list[Array]]:
    """The state after a few steps in the device's engine, and their losses."""
    loaded, given = ENGINE.load(graph, model), example(name)
    state = ENGINE.write_state({port: array for port, array in given.items() if port.startswith("state.")})
    losses = []
    for _ in range(STEPS):
        outputs = loaded.run(given, state)
        state = {**state, **outputs.state}
        losses.append(outputs.arrays["metric.loss"])
    return {port: np.array(array) for port, array in ENGINE.read_state(state).items()}, losses


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "moved"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_leave_the_bits_of_the_whole_program(name: str, in_place: bool) -> None:
    artifact, other, graph, _ = written(name)
    graph = graph if in_place else msgspec.structs.replace(graph, in_place=())
    expected, losses = trained(name, graph, artifact.model)
    found, others = trained(name, graph, other)

    np.testing.assert_array_equal(others, losses)
    assert found.keys() == expected.keys()
    for port, array in expected.items():
        np.testing.assert_array_equal(found[port], array, err_msg=port)


def test_the_rows_are_ports_and_what_only_rows_are_read_of_is_none() -> None:
    inputs, outputs = (
        [
            port.name
            for port in each
            if port.name.startswith(("state.weights.body.0.w", "state.momentum.body.0.w"))
        ]
        for each in read_ports(written("sgd")[1])
    )
    momentum = LARGE.replace("weights", "momentum", 1)
    blocks = -(-4 * WIDE * WIDE // rows.BLOCK_BYTES)

    assert LARGE in inputs and momentum not in inputs
    assert len(inputs) == 2 * blocks + 1
    assert len(outputs) == 2 * blocks and all(map(rows_in, outputs))


def test_it_needs_no_more_memory() -> None:
    artifact, other, graph, _ = written("sgd")
    whole, divided = (ENGINE.load(graph, each).planned_bytes for each in (artifact.model, other))

    assert divided <= whole


def test_small_state_planned_outputs_and_a_tight_plan_stay_as_they_are() -> None:
    small, large = captured("sgd", 64)[1], captured("sgd")[1]

    assert in_rows(small, to_executorch(small)) is None
    assert in_rows(large, to_executorch(large, planned_outputs=True)) is None
    assert in_rows(large, replace(written("sgd")[0], planned_bytes=1)) is None


class _Frames:
    def get(self, ref: BlobRef) -> bytes:
        artifact, _, graph, frame = written("sgd")
        return artifact.model if ref == graph.blob else frame


def test_a_device_tries_it() -> None:
    _, other, graph, frame = written("sgd")
    assert unfolded(graph.variants[0], frame, base=written("sgd")[0].model) == other

    given = example("sgd")
    state = ENGINE.write_state({port: array for port, array in given.items() if port.startswith("state.")})
    choice = fastest(ENGINE, graph, _Frames(), given, state, limit=Limits().max_blob_bytes)

    assert choice is not None and choice.ms.keys() == {"", ROWS} and not choice.dropped


def test_bytes_of_neither_form_are_refused() -> None:
    _, other, graph, _ = written("sgd")
    wrong = bytearray(other)
    wrong[len(wrong) // 2] ^= 1

    with pytest.raises(BundleError, match="is damaged"):
        ENGINE.load(graph, bytes(wrong))


FIRST, SECOND = (f"{LARGE}[{start}:{start + STEP}]" for start in (0, STEP))
DAMAGES = {
    "rows behind the end": (0, SECOND, f"{LARGE}[{WIDE}:{WIDE + STEP}]", "lists no such inputs"),
    "rows of another size": (0, SECOND, f"{LARGE}[{STEP}:{STEP + 1}]", "listed, float32"),
    "rows of nothing": (1, SECOND, f"state.other[{STEP}:{2 * STEP}]", "lists no such outputs"),
    "rows of what is no state": (0, "batch.0.x", f"batch.0.x[0:{BATCH}]", "lists no such inputs"),
    "rows twice": (1, SECOND, FIRST, "rows that are not all of it"),
    "rows beside the whole": (1, "state.weights.head.weight", LARGE, "it is missing from the outputs"),
    "a port that is not there": (0, "batch.0.x", "", "batch.0.x: it is missing from the inputs"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_values_that_do_not_fit_the_manifest_are_refused(kind: str) -> None:
    side, old, new, message = DAMAGES[kind]
    _, other, graph, _ = written("sgd")
    program = Loaded(ENGINE._native, other)
    values = [program.inputs(), program.outputs()]
    assert old in {value.name for value in values[side]}
    values[side] = [replace(each, name=new) if each.name == old else each for each in values[side]]

    with pytest.raises(BundleError, match=message):
        places(graph, *values)
