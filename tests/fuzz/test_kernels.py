"""Wrong updates in the compiled sums: refused or added, and no byte is read beyond those that came."""

from __future__ import annotations

import json
import signal

import pytest

from tests.support.commands import run_python

COUNT = 300
_BEYOND = """
import ctypes, numpy as np
from tests.fuzz.kernels import guarded
array = guarded(np.zeros(5, np.float32))
print(ctypes.string_at(array.ctypes.data, array.nbytes) == bytes(20), flush=True)
ctypes.string_at(array.ctypes.data, array.nbytes + 1)
"""


@pytest.mark.slow
def test_wrong_updates_are_refused_or_added_within_their_bytes() -> None:
    ended = run_python("-m", "tests.fuzz.kernels", "5", COUNT, timeout=600)

    assert ended.returncode == 0, ended.stderr[-2000:]
    outcomes = json.loads(ended.stdout.splitlines()[-1])
    assert outcomes["refused"] > COUNT / 10 and outcomes["added"] > COUNT / 10


@pytest.mark.slow
def test_one_byte_beyond_ends_the_process() -> None:
    ended = run_python("-c", _BEYOND, timeout=600)

    assert ended.stdout == "True\n" and ended.returncode == -signal.SIGSEGV
