"""Progress of long calls: in a terminal and elsewhere; tests/system/test_user_files.py has a notebook."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edgefl.api.progress import reporting
from tests import installed
from tests.support.commands import run_python

COMPILES = """
import edgefl

bundle = edgefl.compile("mlp", training=edgefl.Training(algorithm=edgefl.algorithms.SGD(batch=4, steps=1)))
print(bundle.verify().ok)
"""
REPORTS = """
from edgefl.api.progress import reporting

with reporting("mlp") as report:
    report("exporting graph 1")
"""
EXPORTS = ["-m", "edgefl", "export", "--model", "mlp", "--out", "bundles"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**installed.clone(), "EDGEFL_CACHE": str(tmp_path / "cache"), "TERM": "xterm", "COLUMNS": "120"}


def run_in_terminal(arguments: list[str], folder: Path, environment: dict[str, str]) -> tuple[str, str]:
    """Run Python with a terminal as its standard error; return its output and what the terminal got."""
    ours, theirs = pty.openpty()
    received: list[bytes] = []

    def read() -> None:
        try:
            while part := os.read(ours, 4096):
                received.append(part)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=theirs,
            check=False,
        )
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    text = b"".join(received).decode()
    assert ended.returncode == 0, text[-2000:]
    return ended.stdout.decode(), text


def test_a_terminal_shows_the_progress_of_calls(tmp_path: Path, environment: dict[str, str]) -> None:
    output, terminal = run_in_terminal(["-c", COMPILES], tmp_path, environment)

    assert output == "True\n"
    assert "mlp, tier strong: graph" in terminal and "comparing graph" in terminal
    assert terminal.count("\n") < 10  # one line that changes
    assert "comparing graph" not in terminal.rpartition("\x1b[2K")[2]  # and is removed


def test_a_terminal_shows_the_progress_of_commands(tmp_path: Path, environment: dict[str, str]) -> None:
    output, terminal = run_in_terminal(EXPORTS, tmp_path, environment)

    assert "digest" in output and "exporting graph 1 of" in terminal


def test_pipes_and_logs_hold_no_progress(tmp_path: Path, environment: dict[str, str]) -> None:
    forced = environment | {"FORCE_COLOR": "1"}  # as many CI services set it
    ended = run_python("-c", REPORTS, cwd=tmp_path, env=forced, check=True)

    assert ended.stdout == ended.stderr == ""
    assert "exporting graph 1" in run_in_terminal(["-c", REPORTS], tmp_path, environment)[1]


def test_the_outermost_call_passes_texts_to_its_caller() -> None:
    texts, inner_texts = list[str](), list[str]()
    with reporting("outer", progress=texts.append) as report:
        report("first")
        with reporting("inner") as inner:
            inner("second")
        with reporting(progress=inner_texts.append) as inner:
            inner("third")

    assert (texts, inner_texts) == (["first"], ["third"])
