"""Between the steps of a round: whether it goes on, and how long it rests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl.wire.errors import RoundDeclined
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import TOO_MUCH

_ASK_S = 5.0
"""How often the owner's rules are asked: they may start a command."""
_SLICE_S = 0.1


@dataclass
class Guard:
    """One for a round. ``allowed`` raises RoundDeclined where the owner's rules do not let it go on; ``duty`` is the share
    of the time in which steps are made; ``aborted`` ends a rest."""

    limits: Limits
    allowed: Callable[[], None] = lambda: None
    duty: float = 1.0
    aborted: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _began: float = field(init=False)
    _asked: float = field(init=False)
    _worked_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._began = self._asked = self.clock()

    def worked(self, ms: float) -> None:
        """A step took so many milliseconds."""
        self._worked_s = ms / 1e3

    def between_steps(self) -> None:
        """RoundDeclined if the last step, or the round, took too long, or the owner's rules forbid the next."""
        now, took = self.clock(), self._worked_s
        self._worked_s = 0.0
        if took > self.limits.max_step_s:
            raise _too_long(f"a step took {took:.0f} s", f"limits.max_step_s is {self.limits.max_step_s:g}")
        if now - self._began > self.limits.max_round_s:
            raise _too_long(
                f"the round took {now - self._began:.0f} s",
                f"limits.max_round_s is {self.limits.max_round_s:g}",
            )
        if now - self._asked >= _ASK_S:
            self.allowed()
            self._asked = now
        self._rest(took)

    def _rest(self, worked_s: float) -> None:
        until = self.clock() + worked_s * (1.0 / self.duty - 1.0)
        while (left := until - self.clock()) > 0 and not self.aborted():
            self.sleep(min(left, _SLICE_S))


def _too_long(what: str, limit: str) -> RoundDeclined:
    return RoundDeclined(
        TOO_MUCH, f"{what}, and {limit} here: raise it, or give this device a smaller tier or fewer steps"
    )
