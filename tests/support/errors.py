"""Types of edgefl's errors, and the expectation of one by its details."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from edgefl.errors import *  # noqa: F403
from edgefl.errors import EdgeflError

Kind = TypeVar("Kind", bound=EdgeflError)


@contextmanager
def refuses(kind: type[Kind], /, **details: object) -> Iterator[pytest.ExceptionInfo[Kind]]:
    """Expect an error of the type ``kind`` with exactly these details; ``...`` stands for any value.

    If ``reason``, the code of an error, is among them, others may be left out.
    """
    with pytest.raises(kind) as caught:
        yield caught
    found = {"reason": getattr(caught.value, "reason", None), **caught.value.details}
    names = details if "reason" in details else caught.value.details
    assert {
        name: ... if name in found and details.get(name) is ... else found.get(name) for name in names
    } == details, caught.value
