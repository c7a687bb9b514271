"""Damaged programs are told as such, and never take the process along that looks at them."""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import flatbuffers
import numpy as np
import pytest
import torch
from torch import nn

from edgefl.contract.algorithm import Function
from edgefl.errors import ExportError
from edgefl.wire.bundle.formats import EXECUTORCH_DTYPES
from edgefl.wire.bundle.manifest import BlobRef, Graph
from edgefl_export.compiler.compiler import target_of
from edgefl_export.compiler.manifest import ports
from edgefl_export.executorch.check.isolated import IsolatedRunner
from edgefl_export.executorch.check.programs import TENSOR, read_ports, verify_isolated
from edgefl_export.executorch.target import ExecuTorchTarget
from tests.exporters.examples import step_of

ROUNDS = 100


@pytest.fixture(scope="module")
def written() -> tuple[Function, Graph, bytes]:
    torch.manual_seed(0)
    function = step_of(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (3, 2, 2))
    form = target_of("executorch")
    lowered = form.capture(function)
    model = form.emit(lowered).model
    blob = BlobRef(sha256="", size=len(model), chunk=1)
    graph = Graph(
        name=function.name,
        format="executorch",
        blob=blob,
        inputs=ports(lowered.inputs),
        outputs=ports(lowered.outputs),
    )
    return function, graph, model


def flipped(model: bytes, seed: int) -> bytes:
    """One byte of ``model`` is another."""
    draw = random.Random(seed)
    at = draw.randrange(len(model))
    return model[:at] + bytes([model[at] ^ draw.randrange(1, 256)]) + model[at + 1 :]


def test_ports_are_read_from_the_bytes_as_they_were_written(written: tuple[Function, Graph, bytes]) -> None:
    _, graph, model = written

    for found, listed in zip(read_ports(model), (graph.inputs, graph.outputs), strict=True):
        told = [(port.name, EXECUTORCH_DTYPES[port.dtype], port.shape) for port in found]
        assert told == [(port.name, port.dtype, port.shape) for port in listed]


@pytest.mark.parametrize("kept", [0, 3, 8, 100, 1000])
def test_a_program_that_is_cut_off_is_told(written: tuple[Function, Graph, bytes], kept: int) -> None:
    _, graph, model = written

    assert "export it again" in target_of("executorch").port_mismatch(graph, model[:kept])


def test_a_byte_that_flips_is_told_or_changes_no_port(written: tuple[Function, Graph, bytes]) -> None:
    _, graph, model = written
    form = target_of("executorch")

    told = [form.port_mismatch(graph, flipped(model, seed)) for seed in range(20 * ROUNDS)]

    assert sum("export it again" in each for each in told) > ROUNDS // 20
    assert sum(not each for each in told) > ROUNDS


@pytest.mark.slow
def test_a_damaged_program_ends_no_process_but_its_own(written: tuple[Function, Graph, bytes]) -> None:
    function, _, model = written
    form = ExecuTorchTarget()
    wild = model.replace(struct.pack("<f", 1.0), b"\xff" * 4).replace(b"mm", b"m?")

    with pytest.raises(ExportError, match="cannot read the program of function 'train'"):
        form.verify_untrusted(function, model[:400], 1)
    apart = form._runner
    assert apart is not None
    with pytest.raises(ExportError, match="cannot run the program of function 'train'"):
        apart.run(function.name, model, [np.zeros((0, 4), np.float32)] * len(read_ports(model)[0]))
    with pytest.raises(ExportError):
        form.verify_untrusted(function, wild, 1)
    assert form.verify_untrusted(function, model, 1).worst < 1e-4


@pytest.mark.slow
def test_a_program_that_does_not_end_is_given_up(written: tuple[Function, Graph, bytes]) -> None:
    function, _, model = written

    with pytest.raises(ExportError, match="not done after 0 seconds"):
        verify_isolated(function, model, 1, IsolatedRunner(limit_s=0.0))


def crafted(axes: int, index: int) -> bytes:
    """A program of one value, a tensor of many axes, and one input: the value of this number."""
    made = flatbuffers.Builder(1024)

    def table(fields: int, **slots: int) -> int:
        made.StartObject(fields)
        for slot, at in slots.items():
            made.PrependUOffsetTRelativeSlot(int(slot[1:]), at, 0)
        return made.EndObject()

    def vector(entries: list[int], prepend: Callable[[int], None]) -> int:
        made.StartVector(4, len(entries), 4)
        for entry in entries:
            prepend(entry)
        return made.EndVector()

    sizes = vector([1] * axes, made.PrependInt32)
    tensor = table(3, _2=sizes)
    made.StartObject(2)
    made.PrependUint8Slot(0, TENSOR, 0)
    made.PrependUOffsetTRelativeSlot(1, tensor, 0)
    values = vector([made.EndObject()], made.PrependUOffsetTRelative)
    inputs = vector([index], made.PrependInt32)
    names = table(2, _0=made.CreateString("a"))
    method = made.CreateString("forward")
    plan = table(5, _0=method, _1=names, _2=values, _3=inputs)
    program = table(2, _1=vector([plan], made.PrependUOffsetTRelative))
    made.Finish(program, file_identifier=b"ET12")
    return bytes(made.Output())


def test_a_program_that_refers_to_too_much_or_to_nothing_is_told() -> None:
    assert read_ports(crafted(16, 0))[0][0].shape == (1,) * 16
    with pytest.raises(ValueError, match="17 axes"):
        read_ports(crafted(17, 0))
    for index in (-1, 1):
        with pytest.raises(ValueError, match=f"value {index} of 1"):
            read_ports(crafted(2, index))


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """The process apart starts, reads the name of a folder, and does as this script says."""

    def use(script: str) -> None:
        path = tmp_path / "interpreter"
        path.write_text(f"#!/bin/sh\necho '\"\"'\nread folder\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return use


LIE = "echo nothing >$folder/found.npz; echo '\"\"'"


def test_results_that_cannot_be_read_are_told(interpreter: Callable[[str], None]) -> None:
    interpreter(LIE)

    with pytest.raises(ExportError, match="what it wrote cannot be read"):
        IsolatedRunner().run("train", b"", [])


def test_an_interrupted_run_leaves_no_process_for_the_next(interpreter: Callable[[str], None]) -> None:
    apart = IsolatedRunner(limit_s=20.0)
    interpreter("exec sleep 60")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(
        signal.ITIMER_REAL, 0.5, 5.0
    )  # again: Python drops one that comes while it finalizes an object
    try:
        with pytest.raises(KeyboardInterrupt):
            apart.run("train", b"", [])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    interpreter("exit 3")

    with pytest.raises(ExportError, match="exit status 3"):
        apart.run("train", b"", [])


def test_a_process_apart_is_heard_beyond_the_1024th_open_file(interpreter: Callable[[str], None]) -> None:
    interpreter(LIE)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with pytest.raises(ExportError, match="what it wrote cannot be read"):
            IsolatedRunner().run("train", b"", [])
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# -- what somebody who exports sees of ExecuTorch's own libraries ------------------------------------------


_LOADED = (
    "from edgefl_export.executorch.silent_import import portable_lib; portable_lib()._get_operator_names()"
)


@pytest.mark.slow
def test_the_libraries_are_loaded_without_a_word() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _LOADED], capture_output=True, text=True, timeout=300, check=True
    )

    assert ran.stdout == ran.stderr == ""


@pytest.mark.slow
def test_errors_are_heard_again_after_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"{_LOADED}; import logging, os; logging.warning('a'); os.write(2, b'b')"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    assert ran.stderr == "WARNING:root:a\nb"


_LATER = """
import sys
from edgefl_export.executorch.program import write
from edgefl_export.executorch.silent_import import portable_lib
portable_lib()
packages = "executorch.exir", "executorch.backends.xnnpack", "torchao"
early = [name for name in packages if name in sys.modules and not is_unused(name)]
import executorch.exir
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import schema, to_edge
print(early, executorch.exir.schema is schema is sys.modules["executorch.exir.schema"], callable(to_edge))
"""


@pytest.mark.slow
def test_the_packages_load_where_somebody_asks_for_them() -> None:
    program = f"from edgefl.system.lazy_modules import is_unused\n{_LATER}"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )

    assert ran.stdout == "[] True True\n"
