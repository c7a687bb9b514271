"""A child process ends with its block."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import pytest

from edgefl.system.processes import child_process

WAITS = [sys.executable, "-c", "import sys; print('here', flush=True); sys.stdin.read()"]


@pytest.mark.parametrize("fails", [False, True])
def test_it_ends_and_its_pipes_are_closed(fails: bool) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with suppress(ValueError), child_process(WAITS, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        if fails:
            raise ValueError

    assert process.poll() is not None
    assert process.stdin is not None and process.stdin.closed
    assert process.stdout is not None and process.stdout.closed
