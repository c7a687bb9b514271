"""Tasks in forked processes give what they give here, in their order."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import pytest

from edgefl.errors import ModelError
from edgefl.system.forks import Task, processes_for, side_by_side

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
HERE = os.getpid()


def square(number: int) -> Task[tuple[int, bool]]:
    def task(tell: Callable[[str], None]) -> tuple[int, bool]:
        tell(f"squaring {number}")
        return number**2, os.getpid() == HERE

    return task


def refused(tell: Callable[[str], None]) -> tuple[int, bool]:
    raise ModelError("there is no such size", size=3)


def killed(tell: Callable[[str], None]) -> tuple[int, bool]:
    if os.getpid() != HERE:
        os._exit(1)
    return -1, True


def unsendable(tell: Callable[[str], None]) -> object:
    return threading.Lock(), os.getpid() == HERE


def test_results_come_in_the_order_of_the_tasks() -> None:
    told: list[str] = []

    results = list(side_by_side([square(number) for number in range(7)], told.append, processes=3))

    assert results == [(number**2, False) for number in range(7)]
    assert sorted(told) == [f"squaring {number}" for number in range(7)]


def test_one_process_is_this_one() -> None:
    results = list(side_by_side([square(2), square(3)], lambda _: None, processes=1))

    assert results == [(4, True), (9, True)]


def test_an_error_is_raised_where_its_result_would_be() -> None:
    results = side_by_side([square(2), refused, square(3)], lambda _: None, processes=2)

    assert next(results) == (4, False)
    with pytest.raises(ModelError, match="no such size") as raised:
        next(results)
    assert raised.value.details == {"size": 3}


def test_what_a_process_took_with_it_is_done_here() -> None:
    results = list(side_by_side([killed, killed, square(3), square(4)], lambda _: None, processes=2))

    assert results == [(-1, True), (-1, True), (9, True), (16, True)]


def test_a_process_that_cannot_begin_leaves_its_tasks_to_this_one() -> None:
    def begin() -> None:
        raise RuntimeError("no gradients here")

    results = list(side_by_side([square(2), square(3)], lambda _: None, processes=2, begin=begin))

    assert results == [(4, True), (9, True)]


def test_a_result_that_cannot_be_sent_is_made_here() -> None:
    results = list(side_by_side([unsendable, unsendable], lambda _: None, processes=2))

    assert [here for _, here in results] == [True, True]  # type: ignore[misc, attr-defined]


def test_what_takes_more_than_is_free_has_one_process() -> None:
    assert processes_for(1 << 60) == 1 <= processes_for(1) <= (os.cpu_count() or 1)
