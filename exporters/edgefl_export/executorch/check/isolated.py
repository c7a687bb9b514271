"""Runs of untrusted programs in a child process.

ExecuTorch checks little of what it reads, so a damaged program may crash the process that runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from edgefl.errors import ExportError, not_on_windows
from edgefl.system.processes import module_command
from edgefl_export.executorch.silent_import import METHOD, portable_lib
from edgefl_export.verify.rounding import Array

LIMIT_S = 120.0
"""Longest run of a single program in seconds; ``START_S`` limits the start of the process."""
START_S = 300.0
MODEL, GIVEN, FOUND = "model.pte", "given.npz", "found.npz"


class IsolatedRunner:
    """Child process that runs one program after another. It is started for the first one, and again after a crash.

    Args:
        limit_s: longest run of a program in seconds.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, name: str, model: bytes, arrays: Sequence[Array]) -> list[Array]:
        """Run a program in the child process and return its outputs.

        Args:
            name: name of the function, for errors.
            model: bytes of the program.
            arrays: inputs in order.

        Raises:
            ExportError: if the program fails, exceeds the time limit or crashes the process.
        """
        with tempfile.TemporaryDirectory(prefix="edgefl-isolated-") as folder:
            (Path(folder) / MODEL).write_bytes(model)
            write(Path(folder) / GIVEN, arrays)
            problem = self._run_folder(folder)
            if not problem:
                try:
                    return read(Path(folder) / FOUND)
                except (BadZipFile, KeyError, OSError, ValueError) as error:
                    problem = f"what it wrote cannot be read: {error}"
            raise ExportError(
                f"ExecuTorch cannot run the program of function {name!r}: {problem}. Export it again",
                function=name,
            )

    def _run_folder(self, folder: str) -> str:
        """Run the program in ``folder`` in the child process, which is started if there is none.

        Return "" on success, else a text with the problem.
        """
        if self._process is None and (problem := self._start()):
            return problem
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(f"{folder}\n".encode())
            process.stdin.flush()
        except BrokenPipeError:
            return self._discard(process)
        return self._answer(process, self._limit_s)

    def _start(self) -> str:
        self._process = subprocess.Popen(
            module_command("edgefl_export.executorch.check.isolated"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        weakref.finalize(self, _stop, self._process)
        return self._answer(self._process, START_S)

    def _answer(self, process: subprocess.Popen[bytes], limit_s: float) -> str:
        """Wait for the answer of the process and return "" on success, else a text with the problem.

        The process is killed if it exceeds the limit or if the wait is interrupted, so that no late answer is read as
        that of the next run.
        """
        try:
            answer = _line(process, limit_s)
        except BaseException:
            process.kill()
            self._discard(process)
            raise
        if answer is None:
            process.kill()
            self._discard(process)
            return f"it was not done after {limit_s:.0f} seconds"
        return str(json.loads(answer)) if answer else self._discard(process)

    def _discard(self, process: subprocess.Popen[bytes]) -> str:
        self._process = None
        _stop(process)
        return f"it ended its process (exit status {process.returncode})"


def _line(process: subprocess.Popen[bytes], limit_s: float) -> bytes | None:
    """Return the next line that the process writes. Return None after ``limit_s`` seconds, b"" if the process has ended."""
    if sys.platform == "win32":
        raise not_on_windows("export for ExecuTorch")
    assert process.stdout is not None
    waiting = select.poll()  # unlike select.select, it takes files beyond the 1024th
    waiting.register(process.stdout, select.POLLIN)
    return process.stdout.readline() if waiting.poll(limit_s * 1000) else None


def write(path: Path, arrays: Sequence[Array]) -> None:
    np.savez(path, **{str(at): array for at, array in enumerate(arrays)})  # type: ignore[arg-type]


def read(path: Path) -> list[Array]:
    with np.load(path, allow_pickle=False) as archive:
        return [archive[str(at)] for at in range(len(archive.files))]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Close the streams of the process and wait for its end; kill it after five seconds."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _run_program(folder: Path) -> str:
    """Run the program in ``folder`` and write its outputs there. Return "" on success, else a text with the error.

    This runs within the child process.
    """
    model = (
        folder / MODEL
    ).read_bytes()  # the runtime reads the bytes where they lie, for as long as it runs
    try:
        module = portable_lib()._load_for_executorch_from_buffer(model)
        inputs = tuple(torch.from_numpy(array) for array in read(folder / GIVEN))
        write(folder / FOUND, [value.numpy() for value in module.run_method(METHOD, inputs)])
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Serve a parent process over standard input and output: write "" as JSON, then for each folder on a line of the
    input the result of its program.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(""), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run_program(Path(line.rstrip("\n")))), file=answers, flush=True)


if __name__ == "__main__":
    main()
