"""What is waited for, and how long it took."""

from __future__ import annotations

import errno
import time

import pytest

from edgefl.errors import StoreError
from edgefl_server.patience import Patience


def test_a_write_is_tried_until_it_succeeds_and_what_was_waited_is_told_once() -> None:
    troubled: list[StoreError] = []
    patience, failures = Patience(0.0, troubled.append), [StoreError("full"), StoreError("full")]

    def write() -> int:
        if failures:
            time.sleep(0.1)  # that a database needs to say that it is away
            raise failures.pop()
        return 7

    assert patience.persist(write) == 7 and len(troubled) == 2
    assert patience.take_waited() > 0.25, "the tries count, and a pause of 0 is none without end"
    assert patience.take_waited() == 0.0


def test_nothing_is_waited_for_once_it_has_ended() -> None:
    patience = Patience(10.0, lambda _: None)
    patience.end()
    with pytest.raises(StoreError):
        patience.persist(lambda: (_ for _ in ()).throw(StoreError("full", errno=errno.ENOSPC)))
