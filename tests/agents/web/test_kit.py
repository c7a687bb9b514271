"""The conformance kit plays the server for the browser's device: every case that means something for it passes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgefl.lab.agents import command_of
from tests.agents.web.fleet import require_browser
from tests.support.commands import run_command

KIT_S = 1800.0


@pytest.mark.slow
def test_the_browsers_device_passes_the_conformance_kit(tmp_path: Path) -> None:
    pytest.importorskip("edgefl_conformance", reason="this release has no conformance kit")
    require_browser()
    kit = [
        sys.executable,
        "-m",
        "edgefl_conformance",
        "run",
        "--patience",
        "3",
        "--out",
        str(tmp_path / "kit"),
    ]

    ran = run_command(*kit, "--", *command_of("web"), "--json", timeout=KIT_S)

    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
