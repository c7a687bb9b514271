"""Control of one round: cancellation, time limits, the owner's rules, and progress reports."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

from edgefl.errors import RoundAborted, RoundDeclined
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import TOO_MUCH
from edgefl_device.policy import OwnerRules, WorkKind
from edgefl_device.round.job import Job

_RULES_PERIOD_S = 5.0
"""Pause between two checks of the owner's rules: they may start a command."""
_REST_SLICE_S = 0.1


@dataclass(frozen=True)
class StepProgress:
    """Progress of a round after one step.

    Attributes:
        stage: ``train``, or ``forward N`` for chunk N of the frozen prefix.
        step: Number of the step, from 1; finished rows in a forward stage.
        steps: Number of steps of the stage.
        loss: Mean training loss so far; NaN if the stage has none.
        step_ms: Time of the step in milliseconds.
    """

    stage: str
    step: int
    steps: int
    loss: float
    step_ms: float


class ProgressSink(Protocol):
    """Interface of a receiver of progress reports."""

    def step_done(self, job: Job, step: StepProgress) -> None: ...


class RoundControl:
    """Control of one round, shared by two threads: the agent's cancels it, the round's checks it between two steps.

    Args:
        job: The round's job; None outside of a federation.
        limits: Longest step (``max_step_s``) and longest round (``max_round_s``), in seconds; None has no limit.
        rules: The owner's rules, checked every few seconds; None allows everything.
        progress: Receiver of finished steps; None for none.
        cancelled: Event that ends the round once it is set; None creates one.
    """

    def __init__(
        self,
        job: Job | None = None,
        *,
        limits: Limits | None = None,
        rules: OwnerRules | None = None,
        progress: ProgressSink | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        self._job = job
        self._limits = limits
        self._rules = rules
        self._progress = progress
        self._cancelled = cancelled or threading.Event()
        self._began = self._rules_checked = time.monotonic()
        self._worked_s = 0.0
        self.work: WorkKind = "train"

    def cancel(self) -> None:
        """End the round: the next check raises RoundAborted."""
        self._cancelled.set()

    def check_cancelled(self) -> None:
        """Raise RoundAborted if the round was cancelled."""
        if self._cancelled.is_set():
            raise RoundAborted("the round ended before this device was done")

    def check(self) -> None:
        """Check between two steps that the round may continue. Sleeps if the owner limits the share of working time.

        Raises:
            RoundAborted: The round was cancelled.
            RoundDeclined: The last step or the round took too long, or the owner's rules forbid the next step.
        """
        self.check_cancelled()
        now, worked_s = time.monotonic(), self._worked_s
        self._worked_s = 0.0
        if (limits := self._limits) is not None:
            if worked_s > limits.max_step_s:
                raise _too_long(
                    f"a step took {worked_s:.0f} s", f"limits.max_step_s is {limits.max_step_s:g}"
                )
            if (took_s := now - self._began) > limits.max_round_s:
                raise _too_long(
                    f"the round took {took_s:.0f} s", f"limits.max_round_s is {limits.max_round_s:g}"
                )
        if self._rules is None:
            return
        if now - self._rules_checked >= _RULES_PERIOD_S:
            self._rules.check(self.work)
            self._rules_checked = now
        until = time.monotonic() + worked_s * (1.0 / self._rules.policy.duty - 1.0)
        while (left := until - time.monotonic()) > 0 and not self._cancelled.is_set():
            time.sleep(min(left, _REST_SLICE_S))

    def worked(self, ms: float) -> None:
        """Record the duration of the last step in milliseconds, for :meth:`check`."""
        self._worked_s = ms / 1e3

    def report(self, step: StepProgress) -> None:
        """Pass a finished step to the progress receiver, if there is one."""
        if self._progress is not None and self._job is not None:
            self._progress.step_done(self._job, step)


def _too_long(fact: str, limit: str) -> RoundDeclined:
    return RoundDeclined(
        TOO_MUCH, f"{fact}, and {limit} here: raise it, or give this device a smaller tier or fewer steps"
    )
