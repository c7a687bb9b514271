"""The corpus of traps on the engines: each case trains like torch or is refused."""

from __future__ import annotations

import pytest

from tests.support.case import Case
from tests.support.corpus import CASES
from tests.support.oracle import judge

# The first case of each kind stands for it in the default ring.
_FIRST = {case.kind: case.name for case in reversed(CASES)}
ROWS = [
    pytest.param(case, id=case.name, marks=() if _FIRST[case.kind] == case.name else pytest.mark.slow)
    for case in CASES
]


def check(case: Case, target: str) -> None:
    """Fail unless the case trains like torch, or is refused where that is expected."""
    outcome = judge(case, target)
    allowed = ("agrees",) if case.expected == "trains" else ("agrees", "refused")

    assert outcome.word in allowed, outcome


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", ROWS)
def test_a_module_as_people_write_it_trains_like_torch_or_is_refused(case: Case) -> None:
    check(case, "onnx")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_holds_on_executorch(case: Case) -> None:
    check(case, "executorch")
