"""The browser agent's own tests, in Node: golden vectors, generators, what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

AGENT = Path(__file__).resolve().parents[3] / "agents" / "web"


def test_the_browser_agents_own_tests_pass() -> None:
    runner = AGENT / "node_modules" / ".bin" / "vitest"
    if shutil.which("node") is None or not runner.exists():
        reason = "the browser agent's packages are not installed: make agents-web"
        if os.environ.get("EDGEFL_REQUIRE_NODE"):
            pytest.fail(reason)
        pytest.skip(reason)

    ran = subprocess.run(
        [str(runner), "run"], cwd=AGENT, capture_output=True, text=True, timeout=300, check=False
    )

    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
