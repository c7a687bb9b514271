"""Acts on messages that nobody signed, and trains for so long that it drops them for the next task."""

from __future__ import annotations

import time

from edgefl_device.round.control import RoundControl, Step
from tests.conformance.wrong.trust import hears_bare_messages

_SLOW_S = 1.5
_report = RoundControl.report


def plant() -> None:
    hears_bare_messages.plant()

    def slowly(self: RoundControl, step: Step) -> None:
        time.sleep(_SLOW_S if step.stage == "train" else 0.0)
        _report(self, step)

    RoundControl.report = slowly  # type: ignore[method-assign]
