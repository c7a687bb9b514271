"""Leaves without a word, so that its will is said."""

from __future__ import annotations

import os
import signal
from typing import Any

from edgefl_device.agent import Agent


def plant() -> None:
    def gone(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Agent._shut_down = gone  # type: ignore[method-assign]
