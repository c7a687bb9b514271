"""Variants of a graph are tried once, and only one that computes the same is ever taken."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from device_runtime.engine.onnx import OnnxEngine
from device_runtime.round.costs import Profiler
from device_runtime.round.graphs import GraphSettings
from device_runtime.round.runner import RoundResult, RoundRunner
from device_runtime.round.tuning import Choice, Forms, Tuning, fastest
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.tensors import Arrays
from tests.device_runtime import tiny
from tests.device_runtime.rounds import Device, World, assert_same
from tests.device_runtime.tiny_forms import forms, with_forms

ROOM = 1 << 30


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path, World(with_forms(tiny.make_bundle())))


def train(device: Device) -> Graph:
    return device.world.bundle.manifest.graph("train")


def run(device: Device, tuning: Tuning | None) -> tuple[RoundResult, Forms]:
    runner = RoundRunner(
        engine=device.engine,
        manifest=device.world.bundle.manifest,
        blobs=device.world,
        memory=device.store,
        profiler=Profiler(),
        settings=GraphSettings(device.folder, 1, tuning=tuning),
    )
    result = runner.run(device.world.job(), tiny.local().fitted(tiny.DATA), {})
    device.store.close_job()  # the next run begins anew
    return result, runner.graphs.forms


def test_what_fails_or_computes_something_else_is_dropped_and_told(device: Device) -> None:
    random = np.random.default_rng(0)
    state: Arrays = {port.name: np.ones(port.shape, port.dtype) for port in (tiny.W, tiny.V, tiny.COUNT)}
    feeds = {
        "batch.0.x": random.random(tiny.X.shape, np.float32),
        "batch.0.y": np.zeros(tiny.Y.shape, np.int64),
        "noise.g": random.random(tiny.NOISE.shape, np.float32),
        "hyper.lr": np.float32(0.1),
    }
    engine = OnnxEngine()
    held = engine.write_state(state)

    found = fastest(engine, train(device), device.world, feeds, held)

    assert {*found.ms} == {"", "same"} and found.variant in found.ms
    assert {*found.dropped} == {"wrong", "unknown", "damaged"}
    assert "it changes state." in found.dropped["wrong"]
    for name, array in engine.read_state(held).items():
        np.testing.assert_array_equal(array, state[name])


def test_a_round_tries_once_and_ends_with_the_same_update(device: Device) -> None:
    plain, _ = run(device, None)
    tuning = Tuning(device.store, memory_bytes=ROOM)

    tried, found = run(device, tuning)
    known = tuning.known(device.engine, train(device))
    assert known is not None and {*found.dropped} == {"train/wrong", "train/unknown", "train/damaged"}
    tuning.choices.keep_choice(
        tuning.key(device.engine, train(device)), msgspec.msgpack.encode(Choice(variant="same"))
    )
    chosen, taken = run(device, tuning)

    assert taken.used == {"train": "same"} and not taken.dropped
    assert taken.artifact(train(device)) == forms()["same"]
    assert_same(tried, plain)
    assert_same(chosen, plain)


@pytest.mark.parametrize("memory", [0, 10])
def test_nothing_is_tried_where_memory_has_no_room_for_it(device: Device, memory: int) -> None:
    tuning = Tuning(device.store, memory_bytes=memory)

    _, forms = run(device, tuning)

    assert tuning.known(device.engine, train(device)) is None and not forms.used


def test_what_another_release_or_processor_found_counts_for_nothing(device: Device) -> None:
    tuning, engine = Tuning(device.store, memory_bytes=ROOM), OnnxEngine()
    device.store.keep_choice(tuning.key(engine, train(device)), b"\xc1")

    assert tuning.known(engine, train(device)) is None
    assert len({Tuning(device.store, threads).key(engine, train(device)) for threads in (1, 2)}) == 2


def test_a_variant_that_is_no_more_in_the_bundle_is_its_own_form(device: Device) -> None:
    tuning = Tuning(device.store)
    device.store.keep_choice(
        tuning.key(device.engine, train(device)), msgspec.msgpack.encode(Choice(variant="gone"))
    )

    assert Forms(device.engine, device.world, tuning).artifact(train(device)) == tiny.train()[1]
