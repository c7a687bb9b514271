"""What a bundle says of an exchange beside its graphs, and that a device runs what it says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from edgefl.contract.algorithm import Algorithm, CarryRule, Function, Phase
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.submodels.cost import TRAINING, RoundCost
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import Graph, Manifest, PhaseSpec, Port, decode_manifest
from edgefl_device.data.samples import Batches
from edgefl_export.artifact import Artifact
from edgefl_export.capture.graph import LoweredGraph, TracedFunction
from edgefl_export.compiler.manifest import batch_size, check_wiring, trained_entries
from edgefl_export.compiler.request import CompileRequest
from edgefl_export.compiler.verify import verify_bundle
from edgefl_export.fit import round_work
from edgefl_export.memory.recompute import Budget
from edgefl_export.onnx.target import OnnxTarget
from tests.device_runtime import tiny
from tests.device_runtime.rounds import Device
from tests.device_runtime.tiny import WIDTH, World
from tests.pairs import by_default
from tests.support.bundles import build_bundle, request_of
from tests.support.errors import ExportError, refuses

SHAPE = TensorSpec((WIDTH, 1))
LABELS = torch.int64


def stream(number: int, rows: int) -> dict[str, TensorSpec]:
    return {f"batch.{number}.x": TensorSpec((rows, WIDTH)), f"batch.{number}.y": TensorSpec((rows,), LABELS)}


def mask(rows: int) -> dict[str, TensorSpec]:
    return {"batch.0.mask": TensorSpec((rows,))}


def start(t: Tensors) -> Tensors:
    return {
        "state.weights.head.w": t["weights.head.w"] * 1,
        "state.m": t["weights.m/head.w"] + t["carry.m/head.w"],
    }


def step(t: Tensors) -> Tensors:
    moved = t["batch.0.x"].mean(0)[:, None] + t["batch.1.x"].sum(0)[:, None] * t["batch.1.y"].sum()
    return {"state.weights.head.w": t["state.weights.head.w"] - t["hyper.lr"] * (t["state.m"] + moved)}


def sweep(t: Tensors) -> Tensors:
    return {"state.m": t["state.m"] + (t["batch.0.x"] * t["batch.0.mask"][:, None]).sum(0)[:, None]}


def finish(t: Tensors) -> Tensors:
    w, m = t["state.weights.head.w"], t["weights.m/head.w"]
    return {"update.head.w": w * 1, "update.m/head.w": m + w, "carry.m/head.w": w - m}


def evaluate(t: Tensors) -> Tensors:
    return {"metric.count": (t["batch.0.x"] @ t["weights.head.w"]).sum()}


def adapt(t: Tensors) -> Tensors:
    return {"weights.head.w": t["weights.head.w"] - t["hyper.lr"] * t["batch.0.x"].mean(0)[:, None]}


STATE = {"state.weights.head.w": SHAPE, "state.m": SHAPE}
LR = {"hyper.lr": TensorSpec(())}
TRAIN = Function("train", step, STATE | stream(0, 4) | stream(1, 2) | LR)
SWEEP = Function("sweep", sweep, STATE | stream(0, 3) | mask(3))
ADAPT = Function("adapt", adapt, {"weights.head.w": SHAPE} | stream(0, 4) | LR)
ALGORITHM = Algorithm(
    name="remembering",
    start=Function(
        "start", start, {name: SHAPE for name in ("weights.head.w", "weights.m/head.w", "carry.m/head.w")}
    ),
    phases=(Phase("train", TRAIN, 5),),
    finish=Function("finish", finish, {"state.weights.head.w": SHAPE, "weights.m/head.w": SHAPE}),
    evaluate=Function("evaluate", evaluate, {"weights.head.w": SHAPE} | stream(0, 4)),
    hyper={"lr": 0.1},
)
SWEEPING = replace(ALGORITHM, phases=(Phase("all", SWEEP, 1, over_data=True), *ALGORITHM.phases))


class Once(OnnxTarget):
    """Each function is lowered and emitted once, in however many algorithms it stands."""

    def __init__(self) -> None:
        self._lowered: dict[int, tuple[Function, LoweredGraph]] = {}
        self._emitted: dict[int, tuple[LoweredGraph, Artifact]] = {}

    def lower(self, traced: TracedFunction) -> LoweredGraph:
        key = id(traced.function)
        if key not in self._lowered:
            self._lowered[key] = traced.function, super().lower(traced)
        return self._lowered[key][1]

    def emit(self, lowered: LoweredGraph, budget: Budget | None = None) -> Artifact:
        if id(lowered) not in self._emitted:
            self._emitted[id(lowered)] = lowered, super().emit(lowered, budget)
        return self._emitted[id(lowered)][1]


FORMAT = Once()


def build(algorithm: Algorithm) -> BundleArchive:
    return build_bundle(
        algorithm, ("head", "m/head"), model="net", tier="weak", data=tiny.DATA, format=FORMAT
    )


# -- the manifest -----------------------------------------------------------------------------------------------


def test_a_manifest_says_how_to_adapt_and_to_draw() -> None:
    listed = build(
        replace(ALGORITHM, personalize=ADAPT, draws="draw", carry_rule=CarryRule(exchanges=2))
    ).manifest

    assert (listed.personalize, listed.draws, listed.carry_exchanges, listed.carry_needed) == (
        "adapt",
        "draw",
        2,
        False,
    )
    assert [port.name for port in listed.graph("adapt").outputs] == ["weights.head.w"]


@pytest.fixture(scope="module")
def plain() -> BundleArchive:
    return build(ALGORITHM)


@pytest.fixture(scope="module")
def swept() -> BundleArchive:
    return build(replace(SWEEPING, draws="draw"))


def test_a_manifest_of_a_plain_algorithm_has_the_defaults(plain: BundleArchive) -> None:
    listed = decode_manifest(plain.encoded)

    assert (listed.v, listed.personalize, listed.draws) == (1, "", "walk")
    assert (listed.carry_exchanges, listed.carry_needed) == (0, False)


def test_a_manifest_says_which_phase_passes_over_the_data(swept: BundleArchive) -> None:
    listed = decode_manifest(swept.encoded)

    assert (listed.v, listed.draws, listed.batch) == (1, "draw", 4)
    assert [(phase.name, phase.over_data) for phase in listed.phases] == [("all", True), ("train", False)]


def test_the_batch_of_a_manifest_is_that_of_the_first_stream() -> None:
    assert batch_size(ALGORITHM) == 4
    assert batch_size(SWEEPING) == 4
    assert batch_size(replace(ALGORITHM, phases=SWEEPING.phases[:1])) == 3


def test_steps_that_draw_differently_from_one_stream_are_told() -> None:
    other = Function("other", step, STATE | stream(0, 4) | stream(1, 3) | LR)
    algorithm = replace(ALGORITHM, phases=(*ALGORITHM.phases, Phase("more", other, 1)))

    with refuses(ExportError, sizes={2, 3}):
        batch_size(algorithm)


def test_an_algorithm_that_reads_no_batch_is_told() -> None:
    still = Function("still", lambda t: {"state.m": t["state.m"] * 2}, STATE)

    with refuses(ExportError, algorithm="remembering"):
        batch_size(replace(ALGORITHM, phases=(Phase("still", still, 1),)))


def test_entries_are_counted_in_the_steps_where_finish_reads_none_of_them() -> None:
    silent = Function(
        "finish", lambda t: {"carry.m/head.w": t["weights.m/head.w"] * 1}, {"weights.m/head.w": SHAPE}
    )

    assert trained_entries(ALGORITHM) == trained_entries(replace(ALGORITHM, finish=silent)) == WIDTH


@pytest.mark.parametrize("extra", [stream(1, 3), {}], ids=["another stream", "no mask"])
def test_a_pass_that_could_not_be_made_as_it_is_meant_is_told(extra: dict[str, TensorSpec]) -> None:
    held = mask(3) if extra else {}

    def fn(t: Tensors) -> Tensors:
        rows = sum(tensor.sum() for name, tensor in t.items() if name.startswith("batch."))
        return {"state.m": t["state.m"] + rows}

    wrong = Function("wrong", fn, STATE | stream(0, 3) | held | extra)

    with refuses(ExportError, function="wrong", batch=...):
        build(replace(ALGORITHM, phases=(Phase("all", wrong, 1, over_data=True), *ALGORITHM.phases)))


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (
            lambda t: {"weights.head.w": t["weights.head.w"].sum(0) + t["batch.0.x"].sum()},
            r"returns 'weights\.head\.w' as float32\[1\]",
        ),
        (
            lambda t: {"weights.other": t["weights.head.w"] * t["batch.0.x"].sum()},
            r"returns 'weights\.other' .* reads nothing of that name",
        ),
        (
            lambda t: {"update.head.w": t["weights.head.w"] * t["batch.0.x"].sum()},
            r"returns \['update'\]; one that adapts",
        ),
    ],
    ids=["another shape", "another name", "another role"],
)
def test_an_adaptation_that_cannot_be_repeated_is_told(fn: object, told: str) -> None:
    wrong = Function("wrong", fn, {"weights.head.w": SHAPE} | stream(0, 4))  # type: ignore[arg-type]

    with pytest.raises(ExportError, match=told):
        build(replace(ALGORITHM, personalize=wrong))


# -- on a device ------------------------------------------------------------------------------------------------


HEAD, MEMORY = tiny.weights()["head"]["head.w"], np.array([[0.5], [-1.0], [2.0]], np.float32)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[list[Device]]:
    made: list[Device] = []
    yield made
    for device in made:
        device.store.close()


def device_of(bundle: BundleArchive, folder: Path, running: list[Device]) -> Device:
    device = Device(folder, World(bundle, {"head": {"head.w": HEAD}, "m/head": {"m/head.w": MEMORY}}))
    running.append(device)
    return device


def trained(carry: tiny.Array, draws: str, *, swept: bool) -> tiny.Array:
    """``step`` in plain numpy."""
    data, rows = tiny.local().fitted(tiny.DATA), tiny.ROWS
    w, m = HEAD, MEMORY + carry
    first = -(-rows // 3) if swept else 0
    m = m + data.x.sum(0)[:, None] if swept else m
    for at in range(first, first + 5):
        outer, inner = (Batches(7, rows, size, draws).indices(k, at) for k, size in ((0, 4), (1, 2)))  # type: ignore[arg-type]
        moved = data.x[outer].mean(0)[:, None] + data.x[inner].sum(0)[:, None] * data.y[inner].sum()
        w = w - np.float32(0.1) * (m + moved)
    return w


@pytest.mark.parametrize("kind", by_default(["plain", "swept"], ["swept"]))
def test_a_device_reads_and_sends_the_servers_memory(
    tmp_path: Path, running: list[Device], kind: str, request: pytest.FixtureRequest
) -> None:
    bundle: BundleArchive = request.getfixturevalue(kind)
    device = device_of(bundle, tmp_path, running)
    carry = np.ones((WIDTH, 1), np.float32)

    result = device.run(device.world.job(), carry={"m/head.w": carry})

    w = trained(carry, bundle.manifest.draws, swept=kind == "swept")
    assert result.update.keys() == {"head.w", "m/head.w"}
    np.testing.assert_allclose(result.update["head.w"], w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.update["m/head.w"], MEMORY + w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.carry["m/head.w"], w - MEMORY, rtol=1e-5, atol=1e-5)


def test_an_algorithm_that_sends_nothing_trains_and_keeps(tmp_path: Path, running: list[Device]) -> None:
    local = Function(
        "finish", lambda t: {"carry.m/head.w": t["state.weights.head.w"] * 1}, {"state.weights.head.w": SHAPE}
    )
    device = device_of(build(replace(ALGORITHM, finish=local)), tmp_path, running)

    result = device.run(device.world.job())

    assert result.update == {}
    zeros = np.zeros((WIDTH, 1), np.float32)
    np.testing.assert_allclose(
        result.carry["m/head.w"], trained(zeros, "walk", swept=False), rtol=1e-5, atol=1e-5
    )


# -- what a graph reads where no device feeds it -----------------------------------------------------------


@pytest.fixture(scope="module")
def listed() -> Manifest:
    return build(replace(SWEEPING, personalize=ADAPT)).manifest


def also_reading(manifest: Manifest, function: str, port: str) -> Manifest:
    def more(graph: Graph) -> Graph:
        new = Port(name=port, role=port.partition(".")[0], dtype="float32", shape=(4,))  # type: ignore[arg-type]
        return (
            msgspec.structs.replace(graph, inputs=(*graph.inputs, new)) if graph.name == function else graph
        )

    return msgspec.structs.replace(manifest, graphs=tuple(map(more, manifest.graphs)))


@pytest.mark.parametrize(
    ("function", "port", "told"),
    [
        (
            "start",
            "state.w",
            r"to start: it may read weights\.\*, carry\.\*, .* and noise\.\*; read it in a step",
        ),
        ("start", "batch.0.x", "to start"),
        (
            "train",
            "weights.w",
            r"to a step: .* batch\.<k>\.x and batch\.<k>\.y; return it from start as state",
        ),
        ("train", "carry.w", "to a step"),
        ("train", "batch.0.mask", "to a step: "),
        ("sweep", "weights.w", "to a step over the data"),
        ("finish", "batch.0.x", r"to finish: .*; return what it needs from a step as state\.\*"),
        (
            "evaluate",
            "hyper.lr",
            r"to evaluate: it may read weights\.\*, batch\.0\.x, .*batch\.0\.mask; evaluate by",
        ),
        ("evaluate", "state.w", "to evaluate"),
        ("evaluate", "carry.w", "to evaluate"),
        ("evaluate", "noise.drop", "to evaluate"),
        ("evaluate", "batch.1.x", "to evaluate"),
        ("adapt", "carry.w", r"to personalize: .*; make the step from weights and batch\.0 alone"),
        ("adapt", "batch.1.x", "to personalize"),
        ("adapt", "batch.0.mask", "to personalize"),
    ],
)
def test_a_port_that_nobody_feeds_is_refused(listed: Manifest, function: str, port: str, told: str) -> None:
    check_wiring(listed)

    with pytest.raises(
        ExportError, match=f"function '{function}' reads '{port}', which no device feeds {told}"
    ) as e:
        check_wiring(also_reading(listed, function, port))
    assert (e.value.details["function"], e.value.details["port"]) == (function, port)


@pytest.mark.parametrize(
    ("function", "port"),
    [
        ("start", "noise.dither"),
        ("finish", "carry.w"),
        ("train", "batch.7.x"),
        ("train", "data.class_counts"),
        ("adapt", "noise.drop"),
        ("adapt", "data.class_counts"),
        ("evaluate", "batch.0.mask"),
    ],
)
def test_what_a_device_does_feed_may_be_read(listed: Manifest, function: str, port: str) -> None:
    check_wiring(also_reading(listed, function, port))


# -- the bundle beside its algorithm ------------------------------------------------------------------------------


def problems(manifest: Manifest, request: CompileRequest) -> list[str]:
    bare = msgspec.structs.replace(manifest, graphs=())
    told = verify_bundle(BundleArchive(bare, {}), request).problems
    return [each for each in told if not each.startswith("graphs:")]


@pytest.fixture(scope="module")
def whole() -> tuple[Manifest, CompileRequest]:
    algorithm = replace(
        SWEEPING, personalize=ADAPT, draws="draw", carry_rule=CarryRule(exchanges=2, needed=True)
    )
    return build(algorithm).manifest, request_of(algorithm, ("head", "m/head"), data=tiny.DATA)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"exchange": "opening"}, "exchange: opening in the bundle,  expected"),
        ({"personalize": ""}, "personalize:  in the bundle, adapt expected"),
        ({"draws": "walk"}, "draws: walk in the bundle, draw expected"),
        ({"carry_exchanges": 0}, "carry is good for exchanges (0: all): 0 in the bundle, 2 expected"),
        ({"carry_needed": False}, "carry is needed: False in the bundle, True expected"),
    ],
)
def test_what_a_device_would_do_otherwise_than_the_algorithm_says_is_told(
    whole: tuple[Manifest, CompileRequest], changes: dict[str, object], problem: str
) -> None:
    manifest, request = whole

    assert problems(manifest, request) == []
    assert problems(msgspec.structs.replace(manifest, **changes), request) == [problem]


def test_a_phase_that_no_longer_passes_over_the_data_is_told(whole: tuple[Manifest, CompileRequest]) -> None:
    manifest, request = whole
    first, *others = manifest.phases
    stepped = PhaseSpec(name=first.name, graph=first.graph, steps=first.steps)

    (told,) = problems(msgspec.structs.replace(manifest, phases=(stepped, *others)), request)

    assert (
        told.startswith("phases: [('all', 'sweep', 1)") and "('all', 'sweep', 'once over the data')" in told
    )


# -- what a round of it is worth --------------------------------------------------------------------------------

COST = RoundCost(parameters=1, macs=100, kept_macs=100, prefix_macs=7, download_bytes=1, upload_bytes=1)


def passing(steps: int) -> Algorithm:
    """5 steps of 4 rows, and a pass in batches of 3 that is declared to have ``steps``."""
    return replace(ALGORITHM, phases=(Phase("all", SWEEP, steps, over_data=True), *ALGORITHM.phases))


def test_steps_count_by_their_batch() -> None:
    assert round_work(ALGORITHM, COST, 50) == TRAINING * 100 * 5 * 4 + 7 * 50
    assert round_work(ALGORITHM, COST) == TRAINING * 100 * 20 + 7 * 20


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_a_pass_counts_every_row_once_in_whole_batches(steps: int) -> None:
    assert round_work(passing(steps), COST, 50) == TRAINING * 100 * (20 + 51) + 7 * 50
    assert round_work(passing(steps), COST) == TRAINING * 100 * (20 + 21) + 7 * 20


def test_a_pass_without_known_rows_is_one_batch() -> None:
    alone = replace(ALGORITHM, phases=passing(1).phases[:1])
    assert round_work(alone, COST) == TRAINING * 100 * 3
    assert round_work(alone, COST, 7) == TRAINING * 100 * 9 + 7 * 7
