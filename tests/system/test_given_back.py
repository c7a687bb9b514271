"""Memory that a process gives back, and goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import numpy as np
from edgefl.system.given_back import give_back
from edgefl_server.aggregate import scans

def resident():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))

def largest():
    array = -np.arange(9, dtype=np.float32)
    return np.uint32(scans.largest(np.array([array.ctypes.data], np.uint64), np.array([9]))).view(np.float32)

first, before = largest(), resident()
given = give_back("libllvmlite")
print(given, before - resident(), first == largest() == 8, give_back("libllvmlite"))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a process has is asked of Linux")
def test_the_compilers_code_is_given_back_and_what_it_compiled_goes_on() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=300
    )
    given, less, same, again = ran.stdout.split()
    assert int(given) > 20 << 20 and int(less) > 15 << 20
    assert same == "True" and again == "0", "there is nothing left that is worth it"
