"""The ExecuTorch engine on small programs, beside numpy and beside its own two ways to run them."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire import tensors
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.manifest import Graph, Port
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine import ENGINES
from edgefl_device.engine.executorch import ExecuTorchEngine
from edgefl_device.engine.executorch.program import NativeError, NativeProgram, readable
from tests.device_runtime import tiny, tiny_pte
from tests.device_runtime.rounds import Device
from tests.device_runtime.tiny import BATCH, COUNT, LR, NOISE, ROWS, WIDTH, V, W, X, Y, port
from tests.support.errors import BundleError, refuses

ENGINE = ExecuTorchEngine()
BOTH = pytest.mark.parametrize("delegated", [False, True], ids=["portable", "xnnpack"])


def feeds() -> Arrays:
    rng = np.random.default_rng(0)
    return {
        X.name: rng.standard_normal(X.shape).astype(np.float32),
        Y.name: np.array([0, 1, 1, 0]),
        NOISE.name: rng.random(NOISE.shape, dtype=np.float32),
        LR.name: np.array(0.1, np.float32),
    }


def first_state() -> Arrays:
    return {
        W.name: np.ones(W.shape, np.float32),
        V.name: np.zeros(V.shape, np.float32),
        COUNT.name: np.zeros((), np.float32),
    }


def expected(steps: int) -> tuple[Array, Array, float]:
    """(w, v, loss of the last step) in numpy."""
    fed, state = feeds(), first_state()
    x, w, v, loss = fed[X.name], state[W.name], state[V.name], 0.0
    for _ in range(steps):
        error = x @ w - fed[Y.name][:, None].astype(np.float32)
        v = v / 2 + x.T @ error / BATCH + fed[NOISE.name] / 100
        w, loss = w - fed[LR.name] * v, float((error**2).mean())
    return w, v, loss


@pytest.fixture(scope="module")
def train() -> tuple[Graph, bytes]:
    """The training step's entry in the manifest, and its program."""
    return tiny_pte.train()


def one_call(data: bytes, inputs: list[Port], outputs: list[Port], given: Arrays) -> Arrays:
    graph = tiny_pte.graph_of("f", data, inputs, outputs)
    return ENGINE.load(graph, data).run(given, {}).arrays


def test_it_says_what_it_is() -> None:
    assert (ENGINE.name, ENGINE.format, ENGINE.version) == ("executorch", "executorch", "1.5.1")


@BOTH
def test_steps_compute_what_numpy_computes(delegated: bool) -> None:
    graph = ENGINE.load(*tiny_pte.train(delegated=delegated))
    state = ENGINE.write_state(first_state())

    for _ in range(5):
        outputs = graph.run(feeds(), state)
        state = outputs.state

    w, v, loss = expected(5)
    np.testing.assert_allclose(state[W.name], w, rtol=1e-5)
    np.testing.assert_allclose(state[V.name], v, rtol=1e-5, atol=1e-6)
    assert float(state[COUNT.name]) == 5.0
    assert outputs.arrays.keys() == {"metric.loss"}
    assert outputs.arrays["metric.loss"].shape == ()
    assert float(outputs.arrays["metric.loss"]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.sample(2)
@BOTH
@pytest.mark.parametrize("prefix", [(), ("stem", "mid")])
def test_a_round_equals_numpys(tmp_path: Path, prefix: tuple[str, ...], delegated: bool) -> None:
    world = tiny.World(tiny_pte.make_bundle(prefix, delegated=delegated))
    device = Device(tmp_path, world, engine=ENGINE)  # type: ignore[arg-type]

    result = device.run(world.job())

    update, carry, loss = tiny.expected_round(world, world.job(), ROWS)
    np.testing.assert_allclose(result.update["head.w"], update, rtol=1e-5)
    np.testing.assert_allclose(result.carry["v"], carry, rtol=1e-5, atol=1e-6)
    assert result.metrics == {"loss": pytest.approx(loss, rel=1e-5)}
    device.store.close()


# -- state -----------------------------------------------------------------------------------------------------


def test_state_moves_between_two_sets_of_buffers(train: tuple[Graph, bytes]) -> None:
    graph, state = ENGINE.load(*train), ENGINE.write_state(first_state())
    seen = []

    for _ in range(6):
        state = graph.run(feeds(), state).state
        seen.append(state[W.name].ctypes.data)

    assert len(set(seen)) == 2
    assert all(one != two for one, two in itertools.pairwise(seen))


def test_state_that_the_manifest_lists_is_written_where_it_was_read(train: tuple[Graph, bytes]) -> None:
    graph = ENGINE.load(msgspec.structs.replace(train[0], in_place=(COUNT.name,)), train[1])
    state = ENGINE.write_state(first_state())
    place = state[COUNT.name].ctypes.data

    for _ in range(3):
        state = graph.run(feeds(), state).state

    assert state[COUNT.name].ctypes.data == place
    assert float(state[COUNT.name]) == 3.0
    np.testing.assert_allclose(state[W.name], expected(3)[0], rtol=1e-5)


def test_a_call_does_not_change_the_state_it_was_given_unless_in_place(train: tuple[Graph, bytes]) -> None:
    graph, state = ENGINE.load(*train), ENGINE.write_state(first_state())

    graph.run(feeds(), state)

    for name, array in first_state().items():
        np.testing.assert_array_equal(state[name], array)


def test_calls_from_one_state_again_and_again_agree(train: tuple[Graph, bytes]) -> None:
    graph, state = ENGINE.load(*train), ENGINE.write_state(first_state())

    results = [graph.run(feeds(), state).state[W.name].copy() for _ in range(4)]

    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_state_does_not_share_the_arrays_it_was_made_from() -> None:
    given = first_state()
    state = ENGINE.write_state(given)

    given[W.name][:] = 7.0

    assert float(state[W.name][0, 0]) == 1.0


def test_state_written_back_goes_on_with_the_same_bits(train: tuple[Graph, bytes]) -> None:
    graph = ENGINE.load(*train)
    state = graph.run(feeds(), ENGINE.write_state(first_state())).state
    restored = ENGINE.write_state(tensors.load(tensors.dump(ENGINE.read_state(state))))
    gc.collect()

    straight = ENGINE.load(*train).run(feeds(), state).state
    resumed = graph.run(feeds(), restored).state

    for name, array in straight.items():
        assert array.tobytes() == resumed[name].tobytes()


def test_state_that_a_graph_does_not_read_is_ignored(train: tuple[Graph, bytes]) -> None:
    state = ENGINE.write_state({**first_state(), "state.other": np.ones(2, np.float32)})

    assert ENGINE.load(*train).run(feeds(), state).state.keys() == {W.name, V.name, COUNT.name}


# -- values ----------------------------------------------------------------------------------------------------


def test_values_of_every_type_pass_unchanged() -> None:
    dtypes = ["float32", "float64", "int64", "int32", "uint8", "int8", "bool", "float16"]
    inputs = [port(f"batch.{place}.x", (2, 3), dtype) for place, dtype in enumerate(dtypes)]
    outputs = [port(f"record.{place}", (3, 2), dtype) for place, dtype in enumerate(dtypes)]
    values = {each.name: np.arange(6).reshape(2, 3).astype(each.dtype) for each in inputs}

    made = one_call(tiny_pte.pte(transposed, inputs), inputs, outputs, values)

    for fed, result in zip(inputs, outputs, strict=True):
        np.testing.assert_array_equal(made[result.name], values[fed.name].T)
        assert made[result.name].dtype == np.dtype(fed.dtype)


def transposed(*arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(array.t().clone() for array in arrays)


@pytest.mark.parametrize("layout", ["F", "strided", "readonly", "unaligned"])
def test_arrays_of_any_layout_may_be_fed(train: tuple[Graph, bytes], layout: str) -> None:
    graph, fed = ENGINE.load(*train), feeds()
    plain = graph.run(fed, ENGINE.write_state(first_state())).arrays["metric.loss"]
    x = fed[X.name]
    if layout == "F":
        x = np.asfortranarray(x)
    elif layout == "strided":
        x = np.repeat(x, 2, axis=1)[:, ::2]
    elif layout == "readonly":
        x.flags.writeable = False
    else:
        x = np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)

    assert graph.run({**fed, X.name: x}, ENGINE.write_state(first_state())).arrays["metric.loss"] == plain


@pytest.mark.parametrize(
    "wrong", [np.zeros((BATCH, WIDTH + 1), np.float32), np.zeros((BATCH, WIDTH)), np.zeros(WIDTH, np.float32)]
)
def test_a_value_of_another_form_is_refused_early(train: tuple[Graph, bytes], wrong: Array) -> None:
    graph = ENGINE.load(*train)

    with refuses(BundleError, graph="train", port="batch.0.x"):
        graph.run({**feeds(), X.name: wrong}, ENGINE.write_state(first_state()))


def test_memory_that_ends_with_its_page_is_copied_and_other_memory_is_not() -> None:
    pages = np.zeros(3 * 4096, np.uint8)
    start = -pages.ctypes.data % 4096
    at_the_end, inside = pages[start : start + 4096], pages[start : start + 2048]

    assert not np.shares_memory(readable(at_the_end), at_the_end)
    assert np.shares_memory(readable(inside), inside)


def test_a_program_at_an_odd_address_loads(train: tuple[Graph, bytes]) -> None:
    odd = memoryview(b"." + train[1])[1:]

    program = NativeProgram(ENGINE._native, odd)  # type: ignore[arg-type]

    assert [value.shape for value in program.inputs()] == [port.shape for port in train[0].inputs]


# -- what a device has -----------------------------------------------------------------------------------------

_WITHOUT_TORCH = """
import sys
for name in ("torch", "onnxruntime", "onnx"):
    sys.modules[name] = None
import numpy as np
from edgefl_device.engine import open_engine
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.manifest import Graph, Port
data = open(sys.argv[1], "rb").read()
x = Port(name="batch.0.x", role="batch", dtype="float32", shape=(2, 2))
y = Port(name="record.x", role="record", dtype="float32", shape=(2, 2))
graph = Graph(name="f", format="executorch", blob=describe(data, 1024), inputs=(x,), outputs=(y,))
made = open_engine("executorch").load(graph, data).run({x.name: np.eye(2, dtype=np.float32)}, {})
print(made.arrays["record.x"].tolist(), "executorch" in sys.modules)
"""


def test_a_program_runs_without_torch_and_onnxruntime(tmp_path: Path) -> None:
    inputs = [port("batch.0.x", (2, 2))]
    (tmp_path / "f.pte").write_bytes(tiny_pte.pte(lambda x: (x @ x + 1,), inputs))
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(tmp_path / "f.pte")]

    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)

    assert ran.stdout.strip() == "[[2.0, 1.0], [1.0, 2.0]] False"


@pytest.mark.parametrize("name", ENGINES)
def test_a_device_imports_the_runtime_of_its_own_engine_only(name: str) -> None:
    script = (
        "import sys\nimport edgefl_device.agent, edgefl_device.round.trainer\n"
        "from edgefl_device.engine import open_engine\n"
        f"print(open_engine({name!r}).format)\n"
        "print(sorted({'onnxruntime', 'executorch', 'torch'} & set(sys.modules)),"
        " 'edgefl_device.engine.executorch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )

    imported = {"onnx": "['onnxruntime'] False", "executorch": "[] True"}
    assert ran.stdout.splitlines() == [name, imported[name]]


def test_executorchs_own_runtime_works_in_the_same_process() -> None:
    from executorch.runtime import Runtime

    data = tiny_pte.pte(lambda x: (x @ x + 1,), [port("batch.0.x", (2, 2))])
    method = Runtime.get().load_program(data).load_method("forward")
    assert method is not None

    assert method.execute([torch.eye(2)])[0].tolist() == [[2.0, 1.0], [1.0, 2.0]]


# -- programs that the ExecuTorch engine refuses: each by name, before the runtime can come to harm --------


PORTS = tiny.train()[0]


@pytest.fixture(scope="module")
def program() -> bytes:
    """The training step as ExecuTorch's exporter writes it."""
    return tiny_pte.train()[1]


def _train(**changes: object) -> Graph:
    """The training step's entry in the manifest."""
    return msgspec.structs.replace(tiny_pte.train()[0], **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": PORTS.inputs[:-1]},
        {"outputs": (*PORTS.outputs, port("metric.acc", ()))},
        {"inputs": (port(W.name, (WIDTH, 2)), *PORTS.inputs[1:])},
        {"inputs": (port(W.name, (WIDTH,)), *PORTS.inputs[1:])},
        {"inputs": (port(W.name, W.shape, "float64"), *PORTS.inputs[1:])},
        {"outputs": (port(W.name, W.shape, "int64"), *PORTS.outputs[1:])},
    ],
    ids=["inputs", "outputs", "shape", "rank", "dtype", "out-dtype"],
)
def test_ports_unlike_the_manifests_are_refused(program: bytes, changes: dict[str, tuple[Port, ...]]) -> None:
    with pytest.raises(
        BundleError, match=r"graph 'train' and its manifest disagree on .* listed, .* in the program"
    ):
        ENGINE.load(_train(**changes), program)


def test_a_program_that_plans_too_much_is_refused(program: bytes) -> None:
    planned = ENGINE.load(_train(), program).planned_bytes
    assert planned > 1

    ENGINE.load(_train(planned_bytes=planned), program)
    with refuses(BundleError, graph="train", planned_bytes=112):
        ENGINE.load(_train(planned_bytes=planned - 1), program)


def test_the_number_of_threads_stays_while_a_program_is_loaded(program: bytes) -> None:
    native = ENGINE._native
    gc.collect()
    before = native._threads
    held = NativeProgram(native, program)
    native.set_threads(before)
    with pytest.raises(NativeError, match=f"programs are open that work with {before}"):
        native.set_threads(before + 1)
    del held
    native.set_threads(before + 1)
    native.set_threads(before)


def test_a_program_that_planned_its_inputs_is_refused() -> None:
    data = tiny_pte.pte(tiny_pte.step, PORTS.inputs, planned=True)

    with pytest.raises(
        BundleError, match=r"state.weights.head.w: it is in memory that the program planned itself"
    ):
        ENGINE.load(tiny_pte.graph_of("train", data, PORTS.inputs, PORTS.outputs), data)


def _named(data: bytes) -> Graph:
    """The manifest entry of these bytes, damaged or not."""
    return _train(blob=describe(data, tiny.CHUNK))


@pytest.mark.parametrize(
    ("known", "other"), [(b"aten::mm", b"aten::zz"), (b"XnnpackBackend", b"YnnpackBackend")]
)
def test_an_operator_or_delegate_that_is_missing_is_refused_by_name(known: bytes, other: bytes) -> None:
    data = tiny_pte.train(delegated=known.startswith(b"Xnn"))[1]
    assert known in data
    unknown = data.replace(known, other)

    with pytest.raises(BundleError, match=f"cannot load graph 'train': .*{other.decode()}"):
        ENGINE.load(_named(unknown), unknown)


def test_a_program_cut_short_is_refused_by_name(program: bytes) -> None:
    for artifact in (b"", b"no graph", program[:40], program[: len(program) // 2], program[:-100]):
        with refuses(BundleError, sha256=...):
            ENGINE.load(_train(), artifact)


@given(place=st.integers(0, 1 << 20), flipped=st.integers(1, 255))
def test_a_damaged_program_is_refused_before_loading(program: bytes, place: int, flipped: int) -> None:
    damaged = bytearray(program)
    damaged[place % len(damaged)] ^= flipped

    with refuses(BundleError, sha256=...):
        ENGINE.load(_train(), bytes(damaged))


def test_a_check_that_fails_inside_the_runtime_ends_no_process() -> None:
    """A kernel is given a list of dimensions where it wants a tensor."""
    from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary

    inputs, outputs = [X], [port("record.x", (WIDTH,))]
    written = deserialize_pte_binary(tiny_pte.pte(lambda x: (x.sum(dim=0),), inputs))
    call = written.program.execution_plan[0].chains[0].instructions[0].instr_args
    call.args[0], call.args[1] = call.args[1], call.args[0]
    data = bytes(serialize_pte_binary(written))
    graph = ENGINE.load(tiny_pte.graph_of("f", data, inputs, outputs), data)

    with pytest.raises(BundleError, match=r"executorch cannot run graph 'f': .*EValue is not"):
        graph.run({X.name: np.ones(X.shape, np.float32)}, {})
