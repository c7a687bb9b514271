"""A process that simulates the federation of a file and kills itself at the end of the n-th call of a function:
``python -m tests.simulator.killed FILE FOLDER module:Class.function N``."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

from edgefl.api.simulate import simulate
from edgefl.simulator import folder


def _kill_after(place: str, calls: int) -> None:
    module, _, path = place.partition(":")
    owner, _, name = path.partition(".")
    of = getattr(importlib.import_module(module), owner)
    plain, made = getattr(of, name), 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal made
        result, made = plain(*given, **named), made + 1
        if made == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(of, name, counted)


if __name__ == "__main__":
    file, out, place, calls = sys.argv[1:]
    folder._SAVE_EVERY_S = 0.0
    _kill_after(place, int(calls))
    simulate(file, out, resume=True)
    sys.exit("it was not killed")
