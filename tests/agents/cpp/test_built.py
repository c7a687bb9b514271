"""The C++ agent's own tests: the wire's golden vectors, its store, engines and data, and its C interface."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.agents.cpp.build import build, ctest

ROOMS = {"wire", "store", "data", "engine", "abi", "consumer"}


def test_its_own_tests_pass(tmp_path: Path) -> None:
    told = tmp_path / "tests.xml"
    ran = subprocess.run(
        [ctest(), "--test-dir", build(), "-j", "2", "--output-on-failure", "--output-junit", told],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    listed = subprocess.run(
        [ctest(), "--test-dir", build(), "--show-only=json-v1"], capture_output=True, text=True, check=True
    )

    assert ran.returncode == 0, ran.stdout[-3000:]
    assert {each["name"] for each in json.loads(listed.stdout)["tests"]} >= ROOMS
    assert told.read_text().count('status="run"') >= len(ROOMS)
