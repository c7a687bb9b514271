"""Updates of large state in blocks of rows: the same bits, in the memory of the whole."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgefl.algorithms import catalog
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.bundle.graphs import parse_rows
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.bundle.variants import compress, decompress
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine.executorch import ExecuTorchEngine
from edgefl_device.engine.executorch.program import NativeProgram as Loaded
from edgefl_device.engine.executorch.program import places
from edgefl_device.round.autotune import Autotuner, MemoryTuningStore, TrialStep
from edgefl_export.artifact import Artifact
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.compiler.compiler import target_of
from edgefl_export.compiler.manifest import ports
from edgefl_export.executorch.check.programs import read_ports
from edgefl_export.executorch.program import write
from edgefl_export.executorch.program.write import to_executorch, to_row_variant
from edgefl_export.executorch.target import ROWS
from tests.support.errors import BundleError, refuses

WIDE, BATCH, STEPS = 1024, 4, 3
STEP = write.BLOCK_BYTES // 4 // WIDE
LARGE = "state.weights.body.0.weight"
ALGORITHMS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9, "weight_decay": 1e-3}, "adamw": {}}
ENGINE = ExecuTorchEngine()


@functools.cache
def lowered(name: str, width: int = WIDE) -> tuple[Algorithm, LoweredGraph]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        net = nn.Sequential(OrderedDict(body=body, head=nn.Linear(width, 4)))
        spec = split(net, sample=TensorSpec((width,)), classes=4)
    program = catalog.build(name, Objective(spec.module, spec.sample), batch=BATCH, **ALGORITHMS[name])
    return program, target_of("executorch").capture(program.phases[0].function)


class Forms(NamedTuple):
    """The artifact, its form by rows, the entry of a manifest with both, and how the form travels."""

    artifact: Artifact
    other: bytes
    graph: Graph
    frame: bytes


@functools.cache
def written(name: str) -> Forms:
    found = forms(lowered(name)[1])
    assert found is not None
    return found


def forms(graph: LoweredGraph) -> Forms | None:
    """None where there is no form by rows."""
    form = target_of("executorch")
    artifact = form.emit(graph)
    verified = form.verify(graph.function, artifact.model, 0, artifact.in_place)
    other = form.variants(graph, artifact, verified).get(ROWS)
    if other is None:
        return None
    variant, frame = compress(ROWS, other, 1 << 17, base=artifact.model)
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
    return Forms(artifact, other, entry, frame)


def example(function: Function) -> Arrays:
    return {port: value.numpy() for port, value in function.example(0).items()}


def trained(function: Function, graph: Graph, model: bytes) -> tuple[Arrays, list[Array]]:
    """The state after a few steps in the device's engine, and their losses."""
    loaded, given = ENGINE.load(graph, model), example(function)
    state = ENGINE.write_state({port: array for port, array in given.items() if port.startswith("state.")})
    losses = []
    for _ in range(STEPS):
        outputs = loaded.run(given, state)
        state = {**state, **outputs.state}
        losses.append(outputs.arrays["metric.loss"])
    return {port: np.array(array) for port, array in ENGINE.read_state(state).items()}, losses


def check_same_bits(function: Function, found: Forms, graph: Graph) -> None:
    expected, losses = trained(function, graph, found.artifact.model)
    others, other_losses = trained(function, graph, found.other)

    np.testing.assert_array_equal(other_losses, losses)
    assert others.keys() == expected.keys()
    for port, array in expected.items():
        np.testing.assert_array_equal(others[port], array, err_msg=port)


@pytest.mark.sample(2)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "moved"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_leave_the_bits_of_the_whole_program(name: str, in_place: bool) -> None:
    found = written(name)
    graph = found.graph if in_place else msgspec.structs.replace(found.graph, in_place=())

    check_same_bits(lowered(name)[0].phases[0].function, found, graph)


Step = Callable[[Tensors, Tensor], Tensors]
SQUARE, COLUMN = TensorSpec((WIDE, WIDE)), TensorSpec((WIDE, 1))
ODD: dict[str, tuple[Step, dict[str, TensorSpec], bool]] = {
    "a factor for each row, which is rewritten whole": (
        lambda t, g: {"state.w": t["state.w"] - t["state.s"] * g, "state.s": t["state.s"] * 0.5},
        {"state.s": COLUMN},
        False,
    ),
    "a slow copy, which is rewritten whole": (
        lambda t, g: {
            "state.w": t["state.w"] - 0.1 * g - 0.01 * (t["state.w"] - t["state.slow"]),
            "state.slow": t["state.slow"] * 0.9 + 0.1 * t["state.ref"],
        },
        {"state.slow": SQUARE, "state.ref": SQUARE},
        False,
    ),
    "a factor that is no state": (
        lambda t, g: {"state.w": t["state.w"] - t["batch.0.s"] * g},
        {"batch.0.s": COLUMN},
        True,
    ),
    "a square of one matrix": (
        lambda t, g: {"state.w": t["state.w"] - 0.1 * ((p := t["batch.0.a"] * 2) @ p)},
        {"batch.0.a": SQUARE},
        True,
    ),
    "an average of the new state": (
        lambda t, g: {
            "state.w": (w := t["state.w"] - 0.1 * g),
            "state.mean": 0.9 * t["state.mean"] + 0.1 * w,
        },
        {"state.mean": SQUARE},
        True,
    ),
}


def of_a_layer(step: Step) -> Callable[[Tensors], Tensors]:
    def function(t: Tensors) -> Tensors:
        y = t["batch.0.x"] @ t["state.w"].T
        return {"metric.loss": (y**2).mean(), **step(t, (2 * y / y.numel()).T @ t["batch.0.x"])}

    return function


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ODD)
def test_state_that_blocks_read_is_not_rewritten_before(kind: str) -> None:
    """Where the order cannot be kept there is no form by rows."""
    step, others, has_form = ODD[kind]
    inputs = {"state.w": SQUARE, "batch.0.x": TensorSpec((BATCH, WIDE)), **others}
    function = Function("train", of_a_layer(step), inputs)
    found = forms(target_of("executorch").capture(function))

    assert (found is not None) == has_form
    if found is not None:
        check_same_bits(function, found, found.graph)


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
    blocks = -(-4 * WIDE * WIDE // write.BLOCK_BYTES)

    assert LARGE in inputs and momentum not in inputs
    assert len(inputs) == 2 * blocks + 1
    assert len(outputs) == 2 * blocks and all(map(parse_rows, outputs))


def test_it_needs_no_more_memory() -> None:
    artifact, other, graph, _ = written("sgd")
    whole, divided = (ENGINE.load(graph, each).planned_bytes for each in (artifact.model, other))

    assert divided <= whole


def test_small_state_planned_outputs_and_a_tight_plan_stay_as_they_are() -> None:
    small, large = lowered("sgd", 64)[1], lowered("sgd")[1]

    assert to_row_variant(small, to_executorch(small)) is None
    assert to_row_variant(large, to_executorch(large, planned_outputs=True)) is None
    assert to_row_variant(large, replace(written("sgd")[0], planned_bytes=1)) is None


class _Frames:
    def get(self, ref: BlobRef) -> bytes:
        artifact, _, graph, frame = written("sgd")
        return artifact.model if ref == graph.blob else frame


def test_a_device_tries_it() -> None:
    _, other, graph, frame = written("sgd")
    assert decompress(graph.variants[0], frame, base=written("sgd")[0].model) == other

    given = example(lowered("sgd")[0].phases[0].function)
    state = ENGINE.write_state({port: array for port, array in given.items() if port.startswith("state.")})
    trial = TrialStep(ENGINE, graph, _Frames(), given, state)
    choice = Autotuner(MemoryTuningStore()).fastest(trial)

    assert choice is not None and choice.ms.keys() == {"", ROWS} and not choice.dropped


def test_bytes_of_neither_form_are_refused() -> None:
    _, other, graph, _ = written("sgd")
    wrong = bytearray(other)
    wrong[len(wrong) // 2] ^= 1

    with refuses(BundleError, sha256=...):
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
