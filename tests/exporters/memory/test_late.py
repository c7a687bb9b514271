"""Large new state waits for what reads the old one, and has its memory: the same bits, in every form of the graph."""

from __future__ import annotations

import functools
from collections import OrderedDict

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from edgefl.algorithms import catalog
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.tensors import Arrays
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.trace import capture
from edgefl_export.compiler.compiler import target_of
from edgefl_export.memory.predict import predicted_peak
from edgefl_export.memory.recompute import lean, updated_last
from edgefl_export.memory.usage import rewritable
from tests.exporters.examples import entry_of

WIDE, BATCH, STEPS = 1024, 4, 3
LARGE = "state.weights.body.0.weight"
ALGORITHMS = {"sgd": {"momentum": 0.9, "weight_decay": 1e-3}, "adamw": {}, "fedprox": {}}


@functools.cache
def lowered(name: str) -> tuple[LoweredGraph, LoweredGraph]:
    """As it is for onnxruntime, and as it is written."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stem, body = nn.Linear(16, WIDE), nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU())
        net = nn.Sequential(OrderedDict(stem=stem, body=body, head=nn.Linear(WIDE, 4)))
        spec = split(net, sample=TensorSpec((16,)), classes=4)
    algorithm = catalog.build(name, Objective(spec.module, spec.sample), batch=BATCH, **ALGORITHMS[name])
    function = algorithm.phases[0].function
    plain = target_of("onnx").capture(function)
    return plain, lean(plain)


@functools.cache
def forms(name: str) -> tuple[Graph, dict[str, bytes]]:
    form, graph = target_of("onnx"), lowered(name)[0]
    artifact = form.emit(graph)
    verified = form.verify(graph.function, artifact.model, 0, artifact.in_place)
    entry = entry_of(graph, artifact)
    return entry, {"": artifact.model, **form.variants(graph, artifact, verified)}


def trained(name: str, graph: Graph, model: bytes) -> Arrays:
    """The state after a few steps in the device's engine."""
    engine = OnnxEngine()
    loaded = engine.load(graph, model)
    given = {port: value.numpy() for port, value in lowered(name)[1].function.example(0).items()}
    state = engine.write_state({port: array for port, array in given.items() if port.startswith("state.")})
    for _ in range(STEPS):
        state = {**state, **loaded.run(given, state).state}
    return {port: array.copy() for port, array in engine.read_state(state).items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_in_one_memory_leave_the_bits_of_steps_in_two(name: str) -> None:
    graph, models = forms(name)
    assert LARGE in graph.in_place
    assert LARGE not in rewritable(lowered(name)[0])

    for form, model in models.items():
        found = trained(name, graph, model)
        expected = trained(name, msgspec.structs.replace(graph, in_place=()), model)
        for port, array in expected.items():
            np.testing.assert_array_equal(found[port], array, err_msg=f"{form}: {port}")


def test_a_step_needs_less_memory() -> None:
    plain, late = lowered("sgd")

    assert predicted_peak(late) < predicted_peak(plain) - 2 * WIDE * WIDE


def one_layer(t: Tensors) -> Tensors:
    y = t["batch.0.x"] @ t["state.w"].T
    grad = y.T @ t["batch.0.x"]
    return {"metric.loss": y.mean(), "state.w": t["state.w"] - t["hyper.lr"] * grad}


def seen_outside(t: Tensors) -> Tensors:
    """The old state is read for a metric, to which no update leads."""
    return {**one_layer(t), "metric.norm": t["state.w"].norm()}


@pytest.mark.parametrize("function", [one_layer, seen_outside])
def test_what_has_nothing_to_wait_for_stays_as_it_is(function: object) -> None:
    specs = {
        "state.w": TensorSpec((WIDE, WIDE)),
        "batch.0.x": TensorSpec((BATCH, WIDE)),
        "hyper.lr": TensorSpec(()),
    }
    graph = capture(Function("train", function, specs))  # type: ignore[arg-type]

    assert updated_last(graph, 1 << 40)[0] is graph


def test_small_state_stays_as_it_is() -> None:
    specs = {"state.w": TensorSpec((8, 8)), "batch.0.x": TensorSpec((BATCH, 8)), "hyper.lr": TensorSpec(())}
    graph = capture(Function("train", one_layer, specs))

    assert updated_last(graph, 1 << 40)[0] is graph
