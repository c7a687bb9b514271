"""The ONNX Runtime engine on graphs made by hand."""

from __future__ import annotations

import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.system.memory import status_bytes
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.tensors import Arrays
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_device.host import anonymous_bytes, resident_bytes, return_memory_early, trim_memory
from tests.device_runtime import tiny
from tests.device_runtime.tiny import BATCH, COUNT, LR, NOISE, WIDTH, V, W, X, Y, node, onnx_bytes, port
from tests.support.errors import BundleError, refuses

ENGINE = OnnxEngine()
START, START_BYTES = tiny.start()
TRAIN, TRAIN_BYTES = tiny.train()
FINISH, FINISH_BYTES = tiny.finish()


def start_feeds() -> Arrays:
    return {"weights.head.w": np.ones((WIDTH, 1), np.float32), "carry.v": np.zeros((WIDTH, 1), np.float32)}


def train_feeds(lr: float = 0.1) -> Arrays:
    rng = np.random.default_rng(0)
    return {
        X.name: rng.standard_normal(X.shape).astype(np.float32),
        Y.name: np.array([0, 1, 1, 0]),
        NOISE.name: rng.random(NOISE.shape, dtype=np.float32),
        LR.name: np.array(lr, np.float32),
    }


def test_it_says_what_it_is() -> None:
    assert (ENGINE.name, ENGINE.format, ENGINE.version) == ("onnxruntime", "onnx", ort.__version__)


ARENA_BYTES = 4 * 4096 * 2048


def measure_dropped() -> list[int]:
    """Return growth since the graph was loaded: memory and addresses without outputs, addresses without the graph."""
    column, row, whole = (
        port("batch.0.x", (4096, 1)),
        port("batch.0.y", (1, 2048)),
        port("update.a", (4096, 2048)),
    )
    nodes = [node("MatMul", "batch.0.x batch.0.y", "product"), node("Neg", "product", "out.update.a")]
    data = onnx_bytes(nodes, [column, row], [whole])
    sizes = {"planned_bytes": 2 * ARENA_BYTES, "arena_bytes": ARENA_BYTES + 1}
    graph = ENGINE.load(
        msgspec.structs.replace(tiny.graph_of("f", data, [column, row], [whole]), **sizes), data
    )
    feeds = {each.name: np.ones(each.shape, np.float32) for each in (column, row)}
    trim_memory()
    before, reserved = anonymous_bytes(), status_bytes("VmData")
    outputs = [graph.run(feeds, {}) for _ in range(2)]
    outputs.clear()
    trim_memory()
    found = [anonymous_bytes() - before, status_bytes("VmData") - reserved]
    del graph
    trim_memory()
    return [*found, status_bytes("VmData") - reserved]


def test_dropped_outputs_leave_memory_and_a_dropped_graph_its_arena() -> None:
    # In a process of its own: threads that other tests leave behind reserve addresses meanwhile.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own:
        memory, addresses, after = own.submit(measure_dropped).result(300)

    assert memory < 1.5 * ARENA_BYTES, "of the arena, the product alone stays"
    assert addresses < 1.5 * ARENA_BYTES, "the arena is one block of the listed size"
    assert after < 0.5 * ARENA_BYTES


def test_outputs_are_sorted_by_role() -> None:
    outputs = ENGINE.load(START, START_BYTES).run(start_feeds(), {})

    assert outputs.state.keys() == {W.name, V.name, COUNT.name}
    assert outputs.arrays == {}
    finished = ENGINE.load(FINISH, FINISH_BYTES).run({}, outputs.state)
    assert finished.arrays.keys() == {"update.head.w", "carry.v"}
    np.testing.assert_array_equal(finished.arrays["update.head.w"], np.ones((WIDTH, 1), np.float32))


def test_scalars_stay_scalars_on_their_way_in_and_out() -> None:
    state = ENGINE.load(START, START_BYTES).run(start_feeds(), {}).state

    outputs = ENGINE.load(TRAIN, TRAIN_BYTES).run(train_feeds(), state)

    assert outputs.arrays["metric.loss"].shape == ()
    assert outputs.state[COUNT.name].numpy().shape == ()


def test_a_scalar_input_reaches_the_graph_without_dimensions() -> None:
    update = port("update.lr", ())
    data = onnx_bytes([node("Identity", LR.name, "out.update.lr")], [LR], [update])
    graph = ENGINE.load(tiny.graph_of("f", data, [LR], [update]), data)

    assert graph.run({LR.name: np.array(0.5, np.float32)}, {}).arrays["update.lr"].shape == ()


def test_outputs_are_matched_by_position_not_by_name() -> None:
    first, second = port("update.a", ()), port("update.b", ())
    nodes = [node("Identity", "zero", "out.update.a"), node("Identity", "one", "out.update.b")]
    data = onnx_bytes(nodes, [], [first, second], ["zero", "one"])

    swapped = ENGINE.load(tiny.graph_of("f", data, [], [second, first]), data).run({}, {}).arrays

    assert {name: float(value) for name, value in swapped.items()} == {"update.b": 0.0, "update.a": 1.0}


def test_a_memory_budget_changes_how_a_graph_runs_and_not_what_comes_out() -> None:
    tight = msgspec.structs.replace(TRAIN, memory_budget=64 << 20)
    state = ENGINE.load(START, START_BYTES).run(start_feeds(), {}).state
    free, frugal = ENGINE.load(TRAIN, TRAIN_BYTES), ENGINE.load(tight, TRAIN_BYTES)

    one, two = state, state
    for _ in range(4):
        first, second = free.run(train_feeds(), one), frugal.run(train_feeds(), two)
        one, two = first.state, second.state
        np.testing.assert_array_equal(second.arrays["metric.loss"], first.arrays["metric.loss"])

    for name, array in ENGINE.read_state(one).items():
        np.testing.assert_array_equal(ENGINE.read_state(two)[name], array)


def test_state_stays_inside_the_engine_between_calls() -> None:
    state = ENGINE.load(START, START_BYTES).run(start_feeds(), {}).state
    graph = ENGINE.load(TRAIN, TRAIN_BYTES)

    for _ in range(3):
        state = graph.run(train_feeds(), state).state
        assert all(isinstance(value, ort.OrtValue) for value in state.values())

    assert float(ENGINE.read_state(state)[COUNT.name]) == 3.0


def test_a_step_does_not_change_the_state_it_was_given() -> None:
    state = ENGINE.load(START, START_BYTES).run(start_feeds(), {}).state
    before = ENGINE.read_state(state)

    ENGINE.load(TRAIN, TRAIN_BYTES).run(train_feeds(), state)

    for name, array in ENGINE.read_state(state).items():
        np.testing.assert_array_equal(array, before[name])


def test_state_that_a_graph_does_not_read_is_ignored() -> None:
    state = ENGINE.load(START, START_BYTES).run(start_feeds(), {}).state
    surplus = {**state, "state.other": state[COUNT.name]}

    assert ENGINE.load(FINISH, FINISH_BYTES).run({}, surplus).arrays.keys() == {"update.head.w", "carry.v"}


def test_a_checkpoint_is_a_copy_that_outlives_the_state() -> None:
    state = ENGINE.load(START, START_BYTES).run(start_feeds(), {}).state
    graph = ENGINE.load(TRAIN, TRAIN_BYTES)
    saved = ENGINE.read_state(state)
    expected = {name: array.copy() for name, array in saved.items()}

    for _ in range(20):
        state = graph.run(train_feeds(), state).state
    del state, graph
    gc.collect()

    for name, array in expected.items():
        np.testing.assert_array_equal(saved[name], array)


def test_state_written_back_goes_on_with_the_same_bits() -> None:
    graph = ENGINE.load(TRAIN, TRAIN_BYTES)
    state = graph.run(train_feeds(), ENGINE.load(START, START_BYTES).run(start_feeds(), {}).state).state
    restored = ENGINE.write_state(tensors.load(tensors.dump(ENGINE.read_state(state))))
    gc.collect()

    straight, resumed = graph.run(train_feeds(), state), graph.run(train_feeds(), restored)

    for name, value in straight.state.items():
        assert value.numpy().tobytes() == resumed.state[name].numpy().tobytes()


@pytest.mark.parametrize("layout", ["F", "strided", "readonly"])
def test_arrays_of_any_layout_may_be_fed(layout: str) -> None:
    state = ENGINE.load(START, START_BYTES).run(start_feeds(), {}).state
    graph = ENGINE.load(TRAIN, TRAIN_BYTES)
    feeds = train_feeds()
    plain = graph.run(feeds, state).arrays["metric.loss"]
    x = feeds[X.name]
    if layout == "F":
        x = np.asfortranarray(x)
    elif layout == "strided":
        x = np.repeat(x, 2, axis=1)[:, ::2]
    else:
        x.flags.writeable = False

    assert graph.run({**feeds, X.name: x}, state).arrays["metric.loss"] == plain


# -- what does not load ----------------------------------------------------------------------------------------


def _changed(**fields: object) -> Graph:
    return msgspec.structs.replace(TRAIN, **fields)


@pytest.mark.parametrize(
    "graph",
    [
        _changed(inputs=TRAIN.inputs[:-1]),
        _changed(inputs=(*TRAIN.inputs, port("hyper.rho", ()))),
        _changed(outputs=TRAIN.outputs[:-1]),
        _changed(outputs=(*TRAIN.outputs, port("metric.acc", ()))),
        _changed(inputs=(port(W.name, (WIDTH, 2)), *TRAIN.inputs[1:])),
        _changed(inputs=(port(W.name, (WIDTH,)), *TRAIN.inputs[1:])),
        _changed(inputs=(port(W.name, W.shape, "float64"), *TRAIN.inputs[1:])),
        _changed(outputs=(port(W.name, (1, 1)), *TRAIN.outputs[1:])),
        _changed(outputs=(port(W.name, W.shape, "int64"), *TRAIN.outputs[1:])),
    ],
    ids=["input", "input+", "output", "output+", "in-shape", "in-rank", "in-dtype", "out-shape", "out-dtype"],
)
def test_ports_that_differ_from_the_manifest_are_refused(graph: Graph) -> None:
    with pytest.raises(BundleError, match="graph 'train' and its manifest disagree"):
        ENGINE.load(graph, TRAIN_BYTES)


@pytest.mark.parametrize(
    "artifact", [b"", b"no graph", TRAIN_BYTES[:40], TRAIN_BYTES[: len(TRAIN_BYTES) // 2]]
)
def test_bytes_that_are_no_graph_are_refused_by_name(artifact: bytes) -> None:
    with refuses(BundleError, graph="train", error=...):
        ENGINE.load(TRAIN, artifact)


@given(place=st.integers(0, len(TRAIN_BYTES) - 1), value=st.integers(0, 255))
def test_a_damaged_graph_raises_nothing_but_bundle_error(place: int, value: int) -> None:
    damaged = TRAIN_BYTES[:place] + bytes([value]) + TRAIN_BYTES[place + 1 :]
    try:
        ENGINE.load(TRAIN, damaged)
    except BundleError:
        return


SHORT = b"\x0a\x08"
LONG = [b"\x0a\x88\x00", b"\x8a\x00\x08", b"\x8a\x80\x80\x00\x88\x80\x80\x80\x00"]


def leaking(form: bytes) -> bytes:
    """A graph whose tensor lies in the file ``secret``, where ``form`` is how the field of the key and its length begin."""
    key = form + b"location"
    place = key + b"\x12\x06secret"
    tensor = bytes([0x08, WIDTH, 0x10, 1, 0x42, 1]) + b"w" + bytes([0x6A, len(place)]) + place + b"\x70\x01"
    out = onnx.helper.make_tensor_value_info("update.w", onnx.TensorProto.FLOAT, [WIDTH])
    made = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["w"], ["update.w"])], "leak", [], [out])
    data = made.SerializeToString() + bytes([0x2A, len(tensor)]) + tensor
    model = onnx.helper.make_model(
        onnx.GraphProto(), opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    model.ClearField("graph")
    return model.SerializeToString() + bytes([0x3A, len(data)]) + data


@pytest.mark.parametrize("form", [SHORT, *LONG])
def test_a_graph_that_names_a_file_is_refused(
    form: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every way to write a number: some are longer than they have to be, and parsers read them."""
    np.full(WIDTH, 7, np.float32).tofile(tmp_path / "secret")
    monkeypatch.chdir(tmp_path)
    data = leaking(form)
    (tensor,) = onnx.ModelProto.FromString(data).graph.initializer
    assert tensor.external_data[0].key == "location"
    with refuses(BundleError, graph="leak"):
        ENGINE.load(tiny.graph_of("leak", data, [], [port("update.w", (WIDTH,))]), data)


def test_a_graph_that_speaks_of_a_location_otherwise_is_loaded() -> None:
    model = onnx.load_from_string(TRAIN_BYTES)
    model.doc_string = model.producer_name = "location"
    data = model.SerializeToString()
    ENGINE.load(tiny.graph_of("train", data, list(TRAIN.inputs), list(TRAIN.outputs)), data)


def test_an_operator_the_runtime_lacks_is_refused() -> None:
    data = onnx_bytes([node("Relu", "batch.0.x", "out.record.x")], [X], [port("record.x", X.shape)])
    unknown = data.replace(b"Relu", b"Rrlu")

    with pytest.raises(BundleError, match="Rrlu"):
        ENGINE.load(tiny.graph_of("f", unknown, [X], [port("record.x", X.shape)]), unknown)


def test_the_static_batch_is_that_of_the_manifest() -> None:
    assert X.shape[0] == Y.shape[0] == BATCH


def in_place_graph() -> tuple[Graph, bytes]:
    """v <- v + v, and w <- w + v, of which only w may be written in place: v is read for both."""
    data = onnx_bytes(
        [
            node("Add", f"{V.name} {V.name}", f"out.{V.name}"),
            node("Add", f"{W.name} {V.name}", f"out.{W.name}"),
        ],
        [V, W],
        [V, W],
    )
    graph = tiny.graph_of("f", data, [V, W], [V, W])
    return msgspec.structs.replace(graph, in_place=(W.name,)), data


def test_only_state_written_in_place_keeps_its_memory() -> None:
    graph = ENGINE.load(*in_place_graph())
    first = ENGINE.write_state(
        {V.name: np.full(V.shape, 2.0, np.float32), W.name: np.full(W.shape, 3.0, np.float32)}
    )
    places = {name: value.data_ptr() for name, value in first.items()}

    second = graph.run({}, first).state
    third = graph.run({}, second).state

    assert third[W.name].data_ptr() == places[W.name]
    assert second[V.name].data_ptr() != places[V.name]
    np.testing.assert_array_equal(third[W.name].numpy(), np.full(W.shape, 9.0))
    np.testing.assert_array_equal(third[V.name].numpy(), np.full(V.shape, 8.0))


def test_read_state_is_let_go_of_while_its_results_stay() -> None:
    return_memory_early()  # as every device does, and no command before this test has undone
    wide = port("state.w", (4096, 4096))
    loss = port("metric.loss", ())
    data = onnx_bytes(
        [
            node("Add", f"{wide.name} {wide.name}", f"out.{wide.name}"),
            node("ReduceSum", f"{wide.name}", f"out.{loss.name}", keepdims=0),
        ],
        [wide],
        [wide, loss],
    )
    graph = ENGINE.load(tiny.graph_of("f", data, [wide], [wide, loss]), data)
    state = ENGINE.write_state({wide.name: np.ones(wide.shape, np.float32)})
    outputs = graph.run({}, state)
    trim_memory()  # blocks that an earlier test has freed may hold the state: what is free is the system's on both sides
    before = resident_bytes()

    state.clear()
    trim_memory()

    assert before - resident_bytes() > 0.9 * 4 * 4096 * 4096
    assert outputs.arrays[loss.name] == 4096 * 4096
    assert outputs.state[wide.name].numpy()[0, 0] == 2.0


def test_arrays_given_as_state_are_never_written_to() -> None:
    graph = ENGINE.load(*in_place_graph())
    given = {V.name: np.full(V.shape, 2.0, np.float32), W.name: np.full(W.shape, 3.0, np.float32)}

    graph.run({}, ENGINE.write_state(given))

    np.testing.assert_array_equal(given[W.name], np.full(W.shape, 3.0))


def test_a_step_that_fails_is_raised_and_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    rows, picked = port("batch.0.y", (BATCH,), "int64"), port("record.x", (BATCH, WIDTH))
    data = onnx_bytes([node("Gather", f"{X.name} {rows.name}", f"out.{picked.name}")], [X, rows], [picked])
    graph = ENGINE.load(tiny.graph_of("g", data, [X, rows], [picked]), data)

    with pytest.raises(Exception, match="indices element out of data bounds"):
        graph.run({X.name: np.zeros(X.shape, np.float32), rows.name: np.full((BATCH,), 99)}, {})

    assert capfd.readouterr() == ("", "")
