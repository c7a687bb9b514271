"""Each planted fault is caught by the case that names it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from edgefl_conformance.catalog import CASES
from edgefl_conformance.results import CaseResult
from tests.conformance.faults import FAULTS
from tests.conformance.playing import of_faults, wrong

HERE = Path(__file__).parent / "wrong"
QUICK = {
    "training.batch_order": "dense1.dense.weight",
    "trust.ignores_signatures": "no update for a task that is not the server's",
    "sending.wrong_nonce": "update.nonce",
    "refusing.no_chunk_digest": "no update by a chunk whose digest is wrong",
    "refusing.wrong_reason": "decline.reason 'wrong-data'",
    "refusing.tells_details": "decline.text ''",
}
"""With the beginning of what was expected in place of what came."""
SLOW = [fault for fault in FAULTS if fault not in QUICK]


@pytest.fixture(scope="module")
def quick() -> Mapping[str, CaseResult]:
    return of_faults(tuple(QUICK))


@pytest.fixture(scope="module")
def slow() -> Mapping[str, CaseResult]:
    return of_faults(SLOW)


@pytest.mark.e2e
@pytest.mark.parametrize("fault", QUICK)
def test_it_is_caught_and_told(fault: str, quick: Mapping[str, CaseResult]) -> None:
    verdict = quick[fault]

    assert (verdict.outcome, verdict.name) == ("failed", FAULTS[fault])
    assert verdict.expected.startswith(QUICK[fault])
    assert verdict.found


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("fault", SLOW)
def test_it_is_caught(fault: str, slow: Mapping[str, CaseResult]) -> None:
    assert slow[fault].outcome == "failed", slow[fault]


def test_every_fault_has_a_case_and_every_wrong_agent_is_in_the_table() -> None:
    planted = {
        f"{path.stem}.{node.name}"
        for path in HERE.glob("[a-z]*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and path.stem != "update"
    }
    names = {case.name for case in CASES}

    assert planted == set(FAULTS)
    assert {fault: case for fault, case in FAULTS.items() if case not in names} == {}


def test_a_wrong_agent_is_our_own_but_for_its_fault() -> None:
    assert wrong("sending.no_will")[-2:] == ("device", "--no-tune")
