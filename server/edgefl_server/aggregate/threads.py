"""Calls that hold no lock of Python's, on several cores at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

Call = Callable[[], None]


def run(calls: Sequence[Call], threads: int) -> None:
    """Make all ``calls`` on so many threads. They must not depend on each other."""
    if threads == 1 or len(calls) < 2:
        for call in calls:
            call()
        return
    submitted = [_pool(threads).submit(call) for call in calls]
    wait(submitted)  # all of them: they know memory by its address, which somebody holds until here only
    for done in submitted:
        done.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool of threads that is kept: starting some takes as long as scanning a megabyte."""
    return ThreadPoolExecutor(threads, thread_name_prefix="aggregate")
