"""Retries of storage operations, and how long they took."""

from __future__ import annotations

import errno
import time
from typing import Any

import pytest

from edgefl.errors import StoreError
from edgefl_server.storage.retry import RetryingJournal, RetryPolicy


class Failures:
    """Listener that keeps the errors, and an operation that fails twice."""

    def __init__(self) -> None:
        self.reported: list[StoreError] = []
        self.pending = [StoreError("full"), StoreError("full")]

    def report_storage_error(self, error: StoreError) -> None:
        self.reported.append(error)

    def tally(self, run: str, number: int) -> int:
        if self.pending:
            time.sleep(0.1)  # a database that is away takes time to refuse
            raise self.pending.pop()
        return number


def test_an_operation_is_retried_until_it_succeeds() -> None:
    failures = Failures()
    policy = RetryPolicy(0.0, failures)
    journal: Any = failures
    assert policy.run(lambda: failures.tally("run", 7)) == 7 and len(failures.reported) == 2
    assert policy.take_waited() > 0.25, "the attempts count, and a pause of 0 is none without end"
    assert policy.take_waited() == 0.0
    assert RetryingJournal(journal, policy).direct is journal


def test_a_stopped_policy_retries_nothing() -> None:
    policy = RetryPolicy(10.0, Failures())
    policy.stop()
    with pytest.raises(StoreError):
        policy.run(lambda: (_ for _ in ()).throw(StoreError("full", errno=errno.ENOSPC)))
