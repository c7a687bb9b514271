"""Programs that the ExecuTorch engine refuses: each by name, before the runtime can come to harm."""

from __future__ import annotations

import gc

import msgspec
import numpy as np
import pytest
from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
from hypothesis import given, settings
from hypothesis import strategies as st

from device_runtime.engine.executorch import ExecuTorchEngine
from device_runtime.engine.executorch.binding import NativeError, Program
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.errors import BundleError
from tests.device_runtime import tiny, tiny_pte
from tests.device_runtime.tiny import WIDTH, W, X, port

ENGINE = ExecuTorchEngine()
TRAIN, TRAIN_BYTES = tiny_pte.train()


def _changed(**fields: object) -> Graph:
    return msgspec.structs.replace(TRAIN, **fields)


@pytest.mark.parametrize(
    "graph",
    [
        _changed(inputs=TRAIN.inputs[:-1]),
        _changed(outputs=(*TRAIN.outputs, port("metric.acc", ()))),
        _changed(inputs=(port(W.name, (WIDTH, 2)), *TRAIN.inputs[1:])),
        _changed(inputs=(port(W.name, (WIDTH,)), *TRAIN.inputs[1:])),
        _changed(inputs=(port(W.name, W.shape, "float64"), *TRAIN.inputs[1:])),
        _changed(outputs=(port(W.name, W.shape, "int64"), *TRAIN.outputs[1:])),
    ],
    ids=["inputs", "outputs", "shape", "rank", "dtype", "out-dtype"],
)
def test_ports_that_differ_from_the_manifest_are_refused(graph: Graph) -> None:
    with pytest.raises(
        BundleError, match=r"graph 'train' and its manifest disagree on .* listed, .* in the program"
    ):
        ENGINE.load(graph, TRAIN_BYTES)


def test_a_program_that_plans_more_than_its_manifest_says_is_refused_before_it_allocates() -> None:
    planned = ENGINE.load(TRAIN, TRAIN_BYTES).planned_bytes
    assert planned > 1

    ENGINE.load(_changed(planned_bytes=planned), TRAIN_BYTES)
    with pytest.raises(
        BundleError, match=f"listed with {planned - 1} bytes, and its program plans {planned}"
    ):
        ENGINE.load(_changed(planned_bytes=planned - 1), TRAIN_BYTES)


def test_the_number_of_threads_stays_while_a_program_is_loaded() -> None:
    native = ENGINE._native
    gc.collect()
    before = native._threads
    held = Program(native, TRAIN_BYTES)
    native.set_threads(before)
    with pytest.raises(NativeError, match=f"programs are open that work with {before}"):
        native.set_threads(before + 1)
    del held
    native.set_threads(before + 1)
    native.set_threads(before)


def test_a_program_that_planned_its_inputs_is_refused() -> None:
    data = tiny_pte.pte(tiny_pte.step, TRAIN.inputs, planned=True)

    with pytest.raises(
        BundleError, match=r"state.weights.head.w: it is in memory that the program planned itself"
    ):
        ENGINE.load(tiny_pte.graph_of("train", data, TRAIN.inputs, TRAIN.outputs), data)


def _named(data: bytes) -> Graph:
    """The manifest entry of these bytes, damaged or not."""
    return _changed(blob=describe(data, tiny.CHUNK))


@pytest.mark.parametrize(
    ("known", "other"), [(b"aten::mm", b"aten::zz"), (b"XnnpackBackend", b"YnnpackBackend")]
)
def test_an_operator_or_delegate_that_is_missing_is_refused_by_name(known: bytes, other: bytes) -> None:
    data = tiny_pte.train(delegated=known.startswith(b"Xnn"))[1]
    assert known in data
    unknown = data.replace(known, other)

    with pytest.raises(BundleError, match=f"cannot load graph 'train': .*{other.decode()}"):
        ENGINE.load(_named(unknown), unknown)


@pytest.mark.parametrize(
    "artifact", [b"", b"no graph", TRAIN_BYTES[:40], TRAIN_BYTES[: len(TRAIN_BYTES) // 2], TRAIN_BYTES[:-100]]
)
def test_a_program_cut_short_is_refused_by_name(artifact: bytes) -> None:
    with pytest.raises(BundleError, match="damaged"):
        ENGINE.load(TRAIN, artifact)


@settings(deadline=None, max_examples=100)
@given(place=st.integers(0, len(TRAIN_BYTES) - 1), value=st.integers(0, 255))
def test_a_damaged_program_is_refused_before_the_runtime_sees_it(place: int, value: int) -> None:
    damaged = TRAIN_BYTES[:place] + bytes([value]) + TRAIN_BYTES[place + 1 :]
    if damaged != TRAIN_BYTES:
        with pytest.raises(BundleError, match="damaged"):
            ENGINE.load(TRAIN, damaged)


def test_a_check_that_fails_inside_the_runtime_ends_no_process() -> None:
    """A kernel is given a list of dimensions where it wants a tensor."""
    inputs, outputs = [X], [port("record.x", (WIDTH,))]
    written = deserialize_pte_binary(tiny_pte.pte(lambda x: (x.sum(dim=0),), inputs))
    call = written.program.execution_plan[0].chains[0].instructions[0].instr_args
    call.args[0], call.args[1] = call.args[1], call.args[0]
    data = bytes(serialize_pte_binary(written))
    graph = ENGINE.load(tiny_pte.graph_of("f", data, inputs, outputs), data)

    with pytest.raises(BundleError, match=r"executorch cannot run graph 'f': .*EValue is not"):
        graph.run({X.name: np.ones(X.shape, np.float32)}, {})
