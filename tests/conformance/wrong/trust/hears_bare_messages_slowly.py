"""Acts on messages that nobody signed, and trains for so long that it drops them for the next task."""

from __future__ import annotations

import time
from typing import Any

from edgefl_device.round.runner import RoundRunner
from tests.conformance.wrong.trust import hears_bare_messages

_SLOW_S = 1.5
_step = RoundRunner._step


def plant() -> None:
    hears_bare_messages.plant()

    def slowly(self: RoundRunner, *arguments: Any) -> Any:
        time.sleep(_SLOW_S)
        return _step(self, *arguments)

    RoundRunner._step = slowly  # type: ignore[method-assign]
