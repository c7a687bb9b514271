"""The browser agent's own tests, in Node: golden vectors, generators, what it refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import needs

AGENT = Path(__file__).resolve().parents[3] / "agents" / "web"


def test_the_browser_agents_own_tests_pass() -> None:
    runner = AGENT / "node_modules" / ".bin" / "vitest"
    needs.require("npm")
    if not runner.exists():
        needs.skip("the browser agent's packages are not installed: make agents-web")

    ran = subprocess.run(
        [str(runner), "run"], cwd=AGENT, capture_output=True, text=True, timeout=300, check=False
    )

    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
