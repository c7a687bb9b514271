"""Retries of storage operations. If a disk is full or a database unreachable, the run waits instead of ending."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from edgefl.errors import StoreError
from edgefl_server.storage.journal import Journal

_Result = TypeVar("_Result")
_Parameters = ParamSpec("_Parameters")

_MAX_PAUSE_S = 10.0
_POLL_S = 0.05
"""Longest time until :meth:`RetryPolicy.stop` is noticed."""


class ActionFailed(StoreError):
    """Error: an action of the coordinator could not be stored, and the server is stopping, so it is not retried."""


class StorageErrorListener(Protocol):
    """Receiver of storage errors that are retried."""

    def report_storage_error(self, error: StoreError) -> None:
        """Report an error of a storage operation. The operation is retried afterwards."""


class RetryPolicy:
    """Policy that repeats a storage operation until it succeeds, or until :meth:`stop`.

    Args:
        pause_s: Seconds before the first retry; doubled for each further one, up to ten seconds.
        listener: Receives each failure.
    """

    def __init__(self, pause_s: float, listener: StorageErrorListener) -> None:
        self._pause_s = pause_s
        self._listener = listener
        self._is_stopped = False
        self._waited = 0.0

    def take_waited(self) -> float:
        """Return the seconds spent in operations that were retried, since the last call.

        In this time the server could not answer devices.
        """
        waited, self._waited = self._waited, 0.0
        return waited

    def run(self, operation: Callable[[], _Result]) -> _Result:
        """Call ``operation`` until it raises no StoreError, and return its result. Blocks between the attempts.

        Raises:
            StoreError: The error of the operation, if it fails after :meth:`stop`.
        """
        began, pause_s = time.monotonic(), self._pause_s
        is_retry = False
        while True:
            try:
                result = operation()
            except StoreError as error:
                if self._is_stopped:
                    raise
                self._listener.report_storage_error(error)
                until = time.monotonic() + max(pause_s, _POLL_S)
                while not self._is_stopped and time.monotonic() < until:
                    time.sleep(_POLL_S)
                pause_s, is_retry = min(2 * pause_s, _MAX_PAUSE_S), True
                continue
            if is_retry:  # the attempts count too: a database that is away may take long to refuse
                self._waited += time.monotonic() - began
            return result

    def stop(self) -> None:
        """Stop retrying: the next failure is raised. May be called from a signal handler."""
        self._is_stopped = True


def _with_retries(
    method: Callable[Concatenate[Journal, _Parameters], _Result],
) -> Callable[Concatenate[RetryingJournal, _Parameters], _Result]:
    """Return a method that repeats the journal's ``method`` until it succeeds."""

    @wraps(method)
    def retried(self: RetryingJournal, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        return self.policy.run(partial(method, self.direct, *args, **kwargs))

    return retried


class RetryingJournal:
    """Journal whose operations block and are retried until they succeed.

    Attributes:
        direct: The journal itself. A server that starts uses it, so that it fails at once if the journal is
            unreadable.
        policy: Policy of the retries.
    """

    def __init__(self, direct: Journal, policy: RetryPolicy) -> None:
        self.direct = direct
        self.policy = policy

    open_round = _with_retries(Journal.open_round)
    reassign = _with_retries(Journal.reassign)
    begin_again = _with_retries(Journal.begin_again)
    stop_taking = _with_retries(Journal.stop_taking)
    end_round = _with_retries(Journal.end_round)
    outcome = _with_retries(Journal.outcome)
    add_to_outcome = _with_retries(Journal.add_to_outcome)
    progress = _with_retries(Journal.progress)
    count_devices = _with_retries(Journal.count_devices)
    tally = _with_retries(Journal.tally)
    reports = _with_retries(Journal.reports)
    undo = _with_retries(Journal.undo)
