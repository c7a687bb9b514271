"""Programs that the ExecuTorch engine refuses: each by name, before the runtime can come to harm."""

from __future__ import annotations

import gc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import BundleError
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.manifest import Graph, Port
from edgefl_device.engine.executorch import ExecuTorchEngine
from edgefl_device.engine.executorch.binding import NativeError, NativeProgram
from tests.device_runtime import tiny, tiny_pte
from tests.device_runtime.tiny import WIDTH, W, X, port

ENGINE = ExecuTorchEngine()
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


def test_a_program_that_plans_too_much_is_refused(
    program: bytes,
) -> None:
    planned = ENGINE.load(_train(), program).planned_bytes
    assert planned > 1

    ENGINE.load(_train(planned_bytes=planned), program)
    with pytest.raises(
        BundleError, match=f"listed with {planned - 1} bytes, and its program plans {planned}"
    ):
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
        with pytest.raises(BundleError, match="damaged"):
            ENGINE.load(_train(), artifact)


@given(place=st.integers(0, 1 << 20), flipped=st.integers(1, 255))
def test_a_damaged_program_is_refused_before_loading(program: bytes, place: int, flipped: int) -> None:
    damaged = bytearray(program)
    damaged[place % len(damaged)] ^= flipped

    with pytest.raises(BundleError, match="damaged"):
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
