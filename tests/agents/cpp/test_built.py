"""The C++ agent's own tests: the wire's golden vectors, its store, engines and data, and its C interface."""

from __future__ import annotations

import json
from pathlib import Path

from tests.agents.cpp.build import run_ctest

ROOMS = {"wire", "store", "data", "engine", "abi", "consumer"}


def test_its_own_tests_pass(tmp_path: Path) -> None:
    told = tmp_path / "tests.xml"
    ran = run_ctest("-j", "2", "--output-on-failure", "--output-junit", told)
    listed = run_ctest("--show-only=json-v1")

    assert ran.returncode == 0, ran.stdout[-3000:]
    assert {each["name"] for each in json.loads(listed.stdout)["tests"]} >= ROOMS
    assert told.read_text().count('status="run"') >= len(ROOMS)
