"""The browser agent's own tests, in Node: golden vectors, generators, what it refuses."""

from __future__ import annotations

from pathlib import Path

from tests import needs
from tests.support.commands import run_command

AGENT = Path(__file__).resolve().parents[3] / "agents" / "web"


def test_the_browser_agents_own_tests_pass() -> None:
    runner = AGENT / "node_modules" / ".bin" / "vitest"
    needs.require("npm")
    if not runner.exists():
        needs.skip("the browser agent's packages are not installed: make agents-web")

    ran = run_command(runner, "run", cwd=AGENT)

    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
