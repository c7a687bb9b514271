"""What does not fit a round is refused, by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.errors import BundleError, DataError
from tests.device_runtime import tiny
from tests.device_runtime.rounds import Device
from tests.device_runtime.tiny import ROWS, World


def with_input(world: World, name: str, extra: tiny.Port) -> None:
    """Let graph ``name`` of the bundle read one more port."""
    listed = world.bundle.manifest
    old = listed.graph(name)
    inputs = (*old.inputs, extra)
    nodes = [tiny.node("Identity", "zero", f"out.{p.name}") for p in old.outputs if p.shape == ()]
    nodes += [tiny.node("Expand", "zero shape", f"out.{p.name}") for p in old.outputs if p.shape != ()]
    data = tiny.onnx_bytes(nodes, inputs, old.outputs, ["zero", "shape"])
    graphs = tuple(
        tiny.graph_of(name, data, inputs, old.outputs) if graph.name == name else graph
        for graph in listed.graphs
    )
    world.bundle = tiny.Bundle(msgspec.structs.replace(listed, graphs=graphs), world.bundle.blobs)
    world.add(data)


@pytest.mark.parametrize("graph", ["start", "train", "finish"])
def test_an_unknown_hyper_parameter_is_refused_by_name(device: Device, graph: str) -> None:
    with_input(device.world, graph, tiny.port("hyper.rho", ()))

    with pytest.raises(BundleError, match=r"sets no value for 'hyper\.rho'"):
        device.run(device.world.job())


@pytest.mark.parametrize("graph", ["start", "train", "finish"])
def test_hyper_parameters_reach_every_graph_that_reads_them(device: Device, graph: str) -> None:
    with_input(device.world, graph, tiny.port("hyper.rho", ()))

    device.run(device.world.job(hyper={"rho": 1.0}))

    assert device.engine.runs[graph] >= 1


@pytest.mark.parametrize("graph", ["start", "train", "finish"])
def test_noise_reaches_every_graph_that_reads_it(device: Device, graph: str) -> None:
    with_input(device.world, graph, tiny.port("noise.n", (2,)))

    device.run(device.world.job())

    assert device.engine.runs[graph] >= 1


@pytest.mark.parametrize(
    ("graph", "name"),
    [("start", "batch.0.x"), ("train", "weights.w"), ("finish", "record.x")],
)
def test_an_input_nobody_feeds_is_refused_by_name(device: Device, graph: str, name: str) -> None:
    with_input(device.world, graph, tiny.port(name, ()))

    with pytest.raises(BundleError, match=rf"graph '{graph}' reads \['{name}'\], which have no source"):
        device.run(device.world.job())


@pytest.mark.parametrize(
    "weight",
    [np.zeros((2, 1), np.float32), np.zeros((3,), np.float32), np.zeros((3, 1), np.float64)],
    ids=["shape", "rank", "dtype"],
)
def test_weights_of_another_form_are_refused_with_both(tmp_path: Path, weight: tiny.Array) -> None:
    units = tiny.weights() | {"head": {"head.w": weight}}
    world = World(tiny.make_bundle(()), units)

    with pytest.raises(BundleError, match=r"weights\.head\.w should be float32 \(3, 1\), found"):
        Device(tmp_path, world).run(world.job())


def test_missing_weights_are_refused_by_name(tmp_path: Path) -> None:
    world = World(tiny.make_bundle(), tiny.weights() | {"stem": {"other": np.zeros(1, np.float32)}})

    with pytest.raises(BundleError, match=r"wants 'stem\.w', which the round's weights do not hold"):
        Device(tmp_path, world).run(world.job())


def test_a_unit_that_is_not_announced_is_refused_by_name(device: Device) -> None:
    del device.world.unit_refs["mid"]

    with pytest.raises(BundleError, match=r"announces no weights for units \['mid'\]"):
        device.run(device.world.job())


def test_a_carry_of_another_shape_is_refused(device: Device) -> None:
    with pytest.raises(BundleError, match=r"carry\.v should be float32 \(3, 1\), found float32 \(5, 1\)"):
        device.run(device.world.job(), carry={"v": np.zeros((5, 1), np.float32)})


def test_data_that_do_not_fit_a_batch_port_are_a_data_error(device: Device) -> None:
    spec = msgspec.structs.replace(tiny.DATA, shape=(5,))
    data = tiny.LocalData(np.zeros((ROWS, 5), np.float32), np.zeros(ROWS, np.int64), "x").fitted(spec)
    device.world = World(tiny.make_bundle(()))
    device.local = data

    with pytest.raises(DataError, match=r"batch\.0\.x should be float32 \(4, 3\), found float32 \(4, 5\)"):
        device.run(device.world.job())
