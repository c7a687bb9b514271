"""Wall clock of a process, shifted by the number of seconds in the file ``EDGEFL_CLOCK_FILE``.

Python imports this module first in a process whose ``PYTHONPATH`` begins with its folder.
"""

import os
import time

_FILE = os.environ.get("EDGEFL_CLOCK_FILE", "")
_true = time.time


def _jumping() -> float:
    try:
        with open(_FILE, encoding="ascii") as file:
            return _true() + float(file.read() or 0.0)
    except (OSError, ValueError):
        return _true()


if _FILE:
    time.time = _jumping
