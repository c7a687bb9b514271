"""The C++ agent passes the conformance kit on both engines; profiles are optional."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.agents.cpp.build import program
from tests.support.commands import run_command

pytest.importorskip("edgefl_conformance")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LEAST = 100
"""Cases of the kit that every engine has."""


@pytest.mark.parametrize("engine", ["onnx", "executorch"])
def test_it_passes_the_kit(tmp_path: Path, engine: str) -> None:
    command = [sys.executable, "-m", "edgefl_conformance", "run", "--engine", engine, "--jobs", "2"]
    ran = run_command(*command, "--out", tmp_path, "--", program("edgefl-agent"), timeout=1200)

    assert ran.returncode == 0, ran.stdout[-3000:]
    assert ran.stdout.count("\npassed ") >= LEAST
    assert ", 0 failed" in ran.stdout
