"""Variants of a graph are tried once, and only one that computes the same is ever taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

from edgefl.errors import BundleError, RoundAborted, RoundDeclined, StoreError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Graph, decode_manifest, encode_manifest
from edgefl.wire.bundle.variants import Variant
from edgefl.wire.tensors import Arrays
from edgefl_device.engine.onnx import OnnxEngine, OnnxGraph
from edgefl_device.round.autotune import (
    DIFFERS,
    FAILS,
    KILLED,
    Autotuner,
    GraphVariants,
    MemoryTuningStore,
    ProcessorTable,
    TrialStep,
    TuningResult,
    is_clear,
    sufficient_threads,
    suited_variant,
)
from edgefl_device.round.trainer import RoundResult
from tests.device_runtime import tiny
from tests.device_runtime.rounds import Device, World, assert_same
from tests.device_runtime.tiny_forms import forms, with_forms

ROOM = 1 << 30
run_trial = TrialStep.run


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path, World(with_forms(tiny.make_bundle())))


def train(device: Device) -> Graph:
    return device.world.bundle.manifest.graph("train")


def run(device: Device, tuner: Autotuner | None) -> tuple[RoundResult, GraphVariants]:
    device.tuner = tuner
    result = device.run(device.world.job())
    device.store.close_job()  # the next run begins anew
    return result, device.loader.variants


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

    tuner = Autotuner(MemoryTuningStore())
    found = tuner.fastest(TrialStep(engine, train(device), device.world, feeds, held))

    assert found is not None
    assert {*found.ms} == {"", "same"} and found.variant in found.ms
    assert found.dropped == {"wrong": DIFFERS, "unknown": FAILS, "damaged": FAILS}
    for name, array in engine.read_state(held).items():
        np.testing.assert_array_equal(array, state[name])
    still = feeds | {name: np.zeros_like(feeds[name]) for name in ("batch.0.x", "noise.g")}
    nothing = {name: np.zeros_like(array) for name, array in state.items()}
    for numbers, left in ((still, nothing), (feeds | {"hyper.lr": np.float32(np.nan)}, state)):
        trial = TrialStep(engine, train(device), device.world, numbers, engine.write_state(left))
        assert tuner.fastest(trial) is None


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("own", "same", "chosen"),
    [
        ((10.0, 10.5, 10.2), (8.0, 8.1), "same"),
        ((10.0, 10.0, 10.0), (15.0, 8.0), "same"),  # slow only while the variant was timed
        ((10.0, 20.0, 20.0), (16.0, 16.0), "same"),  # slower from the variant on
        ((20.0, 10.0, 10.0), (10.0, 10.0), ""),  # quicker from the variant on
        ((10.0, 20.0, 10.0, 20.0), (8.0, 16.0, 21.0), ""),  # never steady: the last turn counts
        ((10.0, 10.0, 10.0), (9.8, 9.2), "same"),  # not clear at first
        ((10.0, 9.1, 9.2), (9.2, 9.3), ""),  # its own form's quickest step, before or behind
        ((10.0, 10.0, 10.0), (9.95, 9.95), ""),  # gains nothing: no third turn
        ((10.0, 10.0, 10.0, 10.0), (9.8, 9.6, 9.8), "same"),  # never clear: the quickest steps count
        (
            (10.0, 10.0, 10.0, 20.0),
            (9.5, 9.5, 20.0),
            "same",
        ),  # of those turns in which the machine stayed as it was
        ((10.0, 10.0, 10.0, 5.2), (9.8, 9.8, 5.0), ""),
    ],
)
def test_forms_are_timed_again_where_the_machine_changed_meanwhile(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    own: tuple[float, ...],
    same: tuple[float, ...],
    chosen: str,
) -> None:
    times = {True: iter(own), False: iter(same)}

    def timed(trial: TrialStep, model: bytes, *others: Any) -> tuple[Arrays, float]:
        outputs, _ = run_trial(trial, model, *others)
        alike = model in (tiny.train()[1], forms()["same"])
        return outputs, next(times[model == tiny.train()[1]]) if alike else 1.0

    monkeypatch.setattr(TrialStep, "run", timed)
    tuner = Autotuner(device.store, memory_bytes=ROOM)

    run(device, tuner)

    found = tuner.known(device.engine, train(device))
    assert found is not None and found.variant == chosen
    assert not [*times[True], *times[False]]


def _never(*_: object, **__: object) -> TuningResult:
    raise AssertionError("tried again")


def test_a_trial_leaves_the_update_as_it_is(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = run(device, None)
    tuner = Autotuner(device.store, memory_bytes=ROOM)

    tried, found = run(device, tuner)
    monkeypatch.setattr(Autotuner, "fastest", _never)
    again, _ = run(device, tuner)
    known = tuner.known(device.engine, train(device))
    assert known is not None and {*found.dropped} == {"train/wrong", "train/unknown", "train/damaged"}
    tuner.keep(device.engine, train(device), TuningResult(variant="same"))
    chosen, taken = run(device, tuner)

    assert taken.used == {"train": "same"} and not taken.dropped
    assert taken.artifact(train(device)) == (forms()["same"], 0)
    assert_same(tried, plain)
    assert_same(again, plain)
    assert_same(chosen, plain)


@pytest.mark.parametrize("memory", [0, 10])
def test_nothing_is_tried_where_memory_has_no_room_for_it(device: Device, memory: int) -> None:
    tuner = Autotuner(device.store, memory_bytes=memory)

    _, variants = run(device, tuner)

    assert tuner.known(device.engine, train(device)) is None and not variants.used


@pytest.mark.parametrize("garbage", [b"\xc1", b"\x81\xa7variant\xa1\xff", b"\x81\xa7variant\x01", b""])
def test_what_another_release_or_processor_found_counts_for_nothing(
    device: Device, garbage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner, engine = Autotuner(device.store, memory_bytes=ROOM), OnnxEngine()
    key = tuner.key(engine, train(device))
    device.store.keep_choice(key, garbage)

    assert tuner.known(engine, train(device)) is None
    keys = {key, tuner.key(OnnxEngine(most_threads=2), train(device))}
    engine.version = "0.0"
    keys.add(tuner.key(engine, train(device)))
    monkeypatch.setattr("edgefl_device.round.autotune.processor", lambda: "another")
    assert len({*keys, tuner.key(engine, train(device))}) == 4


def test_a_form_that_crashed_is_not_tried_again(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Autotuner(device.store, memory_bytes=ROOM)
    key = tuner.key(device.engine, train(device))
    left: list[bytes] = []

    def killed(*_: object) -> str:
        left.append(device.store.choice(key) or b"")  # what a process leaves that ends here
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("edgefl_device.round.autotune.differ", killed)
        run(device, tuner)
    device.store.keep_choice(key, left[0])

    _, variants = run(device, tuner)
    assert {*variants.dropped.values()} == {KILLED} and variants.used == {"train": ""}


@pytest.mark.parametrize("tuner_type", [Autotuner, ProcessorTable])
@pytest.mark.parametrize("interruption", ["cancelled", "engine ended", "exception", "process ends"])
def test_an_interrupted_first_step_is_tried_again(
    device: Device, monkeypatch: pytest.MonkeyPatch, tuner_type: type[Autotuner], interruption: str
) -> None:
    monkeypatch.setattr("edgefl_device.round.autotune.suited_variant", lambda *_: "same")
    tuner = tuner_type(device.store, memory_bytes=ROOM)
    own = tiny.train()[1]
    marks: list[TuningResult | None] = []

    def interrupted(trial: TrialStep, model: bytes, *others: Any) -> tuple[Arrays, float]:
        if model == own:
            return run_trial(trial, model, *others)
        marks.append(tuner.known(device.engine, train(device)))
        if interruption == "process ends":  # in good order: the step is too long to wait for
            tuner.interrupt()
            assert tuner.known(device.engine, train(device)) is None
        if interruption == "exception":
            raise KeyboardInterrupt
        device.control.cancel()
        if interruption == "engine ended":
            raise RoundDeclined("crashed", "the engine's process was ended")
        return run_trial(trial, model, *others)

    with monkeypatch.context() as patch, pytest.raises((RoundAborted, KeyboardInterrupt)):
        patch.setattr(TrialStep, "run", interrupted)
        run(device, tuner)

    assert marks[0] is not None and {*marks[0].dropped.values()} == {KILLED}
    known = tuner.known(device.engine, train(device))
    assert known in (None, TuningResult(variant="same", suited=True)), "untried, or its only step was over"
    _, variants = run(device, tuner)
    assert KILLED not in variants.dropped.values() and "train" in variants.used


@pytest.mark.parametrize("trouble", [RoundAborted("over"), BundleError("no bytes"), StoreError("full")])
def test_what_keeps_a_variant_from_coming_is_no_reason_to_drop_it(device: Device, trouble: Exception) -> None:
    tuner = Autotuner(device.store, memory_bytes=ROOM)
    own = device.world.get

    def get(ref: BlobRef) -> bytes:
        if ref in [variant.blob for variant in train(device).variants]:
            raise trouble
        return own(ref)

    device.world.get = get  # type: ignore[method-assign]
    with pytest.raises(type(trouble)):
        run(device, tuner)
    assert tuner.known(device.engine, train(device)) is None


@pytest.mark.parametrize(
    ("chosen", "memory", "limit"), [("gone", ROOM, ROOM), ("same", 1, ROOM), ("same", ROOM, 10)]
)
def test_an_unusable_variant_is_left_out(device: Device, chosen: str, memory: int, limit: int) -> None:
    tuner = Autotuner(device.store, memory_bytes=memory, limit_bytes=limit)
    tuner.keep(device.engine, train(device), TuningResult(variant=chosen))
    variants = GraphVariants(device.engine, device.world, tuner)

    assert variants.artifact(train(device)) == (tiny.train()[1], 0) and variants.used == {"train": ""}
    assert bool(variants.dropped) == (limit == 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"raw": 0}, "is inconsistent"),
        ({"sha256": "no digest"}, "is inconsistent"),
        ({"name": ""}, "is inconsistent"),
        ({"name": "a\x1b[2J"}, "is inconsistent"),
        ({"name": "wrong"}, "each has a name of its own"),
    ],
)
def test_impossible_variants_are_refused(device: Device, change: dict[str, object], message: str) -> None:
    manifest, graph = device.world.bundle.manifest, train(device)

    def encoded(*variants: Variant) -> bytes:
        changed = msgspec.structs.replace(graph, variants=variants)
        graphs = [changed if each.name == graph.name else each for each in manifest.graphs]
        return encode_manifest(msgspec.structs.replace(manifest, graphs=tuple(graphs)))

    first, *rest = graph.variants
    assert decode_manifest(encoded(first, *rest)) == manifest
    with pytest.raises(BundleError, match=message):
        decode_manifest(encoded(msgspec.structs.replace(first, **change), *rest))
    with pytest.raises(BundleError, match="no more than 8"):
        decode_manifest(encoded(*(msgspec.structs.replace(first, name=str(number)) for number in range(9))))


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_a_long_clear_turn_is_enough(device: Device, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    loaded: list[bytes] = []

    def timed(trial: TrialStep, model: bytes, *others: Any) -> tuple[Arrays, float]:
        loaded.append(model)
        return run_trial(trial, model, *others)[0], 10.0 if model == tiny.train()[1] else 8.0

    monkeypatch.setattr(TrialStep, "run", timed)
    monkeypatch.setattr("edgefl_device.round.autotune.QUICK_S", seconds)

    run(device, Autotuner(device.store, memory_bytes=ROOM))

    assert loaded.count(forms()["same"]) == (2 if seconds else 1)


@pytest.mark.parametrize(
    ("ms", "clear"),
    [
        ({"": 1000.0, "blocked": 900.0}, True),
        ({"": 1000.0, "blocked": 940.0}, False),
        ({"": 1000.0, "blocked": 1001.0, "rows": 1300.0}, True),
        ({"": 1000.0, "blocked": 1001.0, "rows": 985.0}, False),
        ({"": 1000.0, "blocked": 1020.0}, True),
        ({"": 1000.0, "blocked": 950.0, "rows": 500.0}, True),
    ],
)
def test_a_form_that_is_nearly_worth_it_is_timed_again(ms: dict[str, float], clear: bool) -> None:
    assert is_clear(ms) == clear


@pytest.mark.parametrize(
    ("ms", "threads"),
    [
        ({1: 8.0, 2: 7.5, 4: 7.4}, 1),
        ({1: 8.0, 2: 5.0, 4: 4.9}, 2),
        ({1: 8.0, 2: 7.9, 4: 4.0}, 4),
        ({1: 8.0, 3: 9.0}, 1),
    ],
)
def test_a_step_gets_the_threads_that_it_gains_from(ms: dict[int, float], threads: int) -> None:
    assert sufficient_threads(ms) == threads


class Counting(OnnxEngine):
    """Tells with how many threads graphs were loaded."""

    def __init__(self, most_threads: int) -> None:
        super().__init__(most_threads=most_threads)
        self.loaded: list[int] = []

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> OnnxGraph:
        self.loaded.append(threads)
        return super().load(graph, artifact, threads)


@pytest.mark.parametrize("variants", [True, False])
def test_a_round_tries_each_number_of_threads_and_takes_one(tmp_path: Path, variants: bool) -> None:
    bundle = with_forms(tiny.make_bundle())
    if not variants:
        graphs = tuple(msgspec.structs.replace(each, variants=()) for each in bundle.manifest.graphs)
        bundle = replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, graphs=graphs))
    device = Device(tmp_path, World(bundle))
    device.engine = engine = Counting(4)
    tuner = Autotuner(device.store, memory_bytes=ROOM)

    result, found = run(device, tuner)
    known = tuner.known(engine, train(device))
    assert known is not None and {*known.threads_ms} == {1, 2, 4}
    assert {*engine.loaded} == {0, 1, 2, 4} and bool(found.used) == variants
    tuner.keep(engine, train(device), msgspec.structs.replace(known, threads=2))
    engine.loaded.clear()
    again, _ = run(device, tuner)

    assert {*engine.loaded} == {0, 2} and engine.loaded.count(2) == 1
    assert_same(again, result)


def test_sessions_have_powers_of_two_and_the_number_of_the_engine() -> None:
    assert OnnxEngine(6).thread_counts == OnnxEngine(1, most_threads=6).thread_counts == (1, 2, 4, 6)
    assert OnnxEngine(4).thread_counts == (1, 2, 4)
    assert OnnxEngine(1).thread_counts == (1,)


def test_state_that_a_step_only_reads_is_there_in_each_step_of_a_trial(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Add", ["state.w", "state.anchor"], ["out.state.w"])
    w, anchor = tiny.port("state.w", (2, 2)), tiny.port("state.anchor", (2, 2))
    data = tiny.onnx_bytes([node], [w, anchor], [w])
    engine, graph = Counting(2), tiny.graph_of("train", data, [w, anchor], [w])
    state = engine.write_state({port.name: np.ones(port.shape, np.float32) for port in (w, anchor)})

    tuner, trial = Autotuner(MemoryTuningStore()), TrialStep(engine, graph, Single(data), {}, state)
    found = tuner.fastest(trial)
    assert found is not None
    chosen = tuner.with_threads(trial, found)

    assert {*chosen.threads_ms} == {1, 2} and chosen.threads in (1, 2)


class Single:
    """A graph's own artifact."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def get(self, ref: BlobRef) -> bytes:
        return self._data


def test_an_unusable_number_of_threads_is_left_out(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    device.engine = engine = Counting(4)
    tuner = Autotuner(device.store, memory_bytes=ROOM)
    load = OnnxEngine.load

    def refused(self: OnnxEngine, graph: Graph, artifact: bytes, threads: int = 0) -> OnnxGraph:
        if threads == 2:
            raise BundleError("no room for two")
        return load(self, graph, artifact, threads)

    monkeypatch.setattr(OnnxEngine, "load", refused)
    run(device, tuner)
    known = tuner.known(engine, train(device))

    assert known is not None and {*known.threads_ms} == {1, 4} and known.threads in (1, 4)


@pytest.mark.parametrize(("form", "why"), [("same", ""), ("wrong", DIFFERS), ("unknown", FAILS)])
def test_the_form_that_suits_the_processor_is_taken(
    device: Device, monkeypatch: pytest.MonkeyPatch, form: str, why: str
) -> None:
    manifest = device.world.bundle.manifest
    own, fitting = run(device, None)[0], "blocked"
    graphs = [
        msgspec.structs.replace(
            each,
            variants=tuple(
                msgspec.structs.replace(variant, name=fitting if variant.name == form else variant.name)
                for variant in each.variants
            ),
        )
        for each in manifest.graphs
    ]
    device.world.bundle = replace(
        device.world.bundle, manifest=msgspec.structs.replace(manifest, graphs=tuple(graphs))
    )

    found, used = run(device, ProcessorTable(device.store, ROOM, features=_ZEN_2))

    assert used.used == {"train": "" if why else fitting}
    assert used.dropped == ({f"train/{fitting}": why} if why else {})
    assert_same(found, own)
    assert Autotuner(device.store, ROOM).known(device.engine, train(device)) is None  # it was not timed
    monkeypatch.setattr(Autotuner, "fastest", _never)
    assert run(device, ProcessorTable(device.store, ROOM, features=_ZEN_2))[1].used == used.used


_FORMS = ("blocked", "rows", "blocked, rows")
_CASCADE_LAKE = frozenset({"avx", "avx2", "fma", "avx512f", "avx512_vnni"})
_SAPPHIRE_RAPIDS = _CASCADE_LAKE | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}
_ZEN_2 = frozenset({"avx", "avx2", "fma"})
_NEON = frozenset({"fp", "asimd", "asimddp"})


@pytest.mark.parametrize(
    ("format", "features", "threads", "form"),
    [
        ("onnx", _CASCADE_LAKE, 1, "blocked, rows"),
        ("onnx", _SAPPHIRE_RAPIDS, 1, "blocked, rows"),
        ("onnx", _SAPPHIRE_RAPIDS, 2, "blocked"),
        ("onnx", _ZEN_2, 1, "blocked, rows"),
        ("onnx", frozenset({"avx"}), 1, ""),
        ("onnx", _NEON, 1, ""),
        ("onnx", frozenset(), 1, ""),
        ("executorch", _SAPPHIRE_RAPIDS, 1, ""),
    ],
)
def test_a_processor_has_a_form(format: str, features: frozenset[str], threads: int, form: str) -> None:
    assert suited_variant(format, _FORMS, features, threads) == form


def test_a_graph_without_the_best_form_has_the_next_one() -> None:
    assert suited_variant("onnx", ("rows",), _SAPPHIRE_RAPIDS) == "rows"
    assert suited_variant("onnx", (), _SAPPHIRE_RAPIDS) == ""
