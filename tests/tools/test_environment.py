"""Setting up an environment: what is in it, and how little is said about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_wheel import tiny_wheel

TOOL = Path(__file__).resolve().parents[2] / "tools" / "environment.py"


def made(folder: Path, requirement: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), str(folder), str(requirement)],
        env={**os.environ, "INSTALLER": "pip"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_an_environment_is_made_in_four_lines(tmp_path: Path) -> None:
    old = tmp_path / "env" / ".installed"
    old.parent.mkdir()
    old.touch()

    done = made(tmp_path / "env", tiny_wheel(tmp_path))

    assert done.returncode == 0, done.stderr
    first, python, packages, last = done.stdout.splitlines()
    assert first.endswith("neighbour-1.0-py3-none-any.whl") and " GB after " in last
    assert "Python" in python and packages.endswith(" s")
    assert not old.exists()  # an environment of before is made anew
    subprocess.run([tmp_path / "env" / "bin" / "python", "-c", "import neighbour"], check=True)


@pytest.mark.slow
def test_what_cannot_be_installed_is_told_with_the_installer_s_last_words(tmp_path: Path) -> None:
    done = made(tmp_path / "env", tmp_path / "nobody-1.0-py3-none-any.whl")

    assert done.returncode == 1
    assert "nobody-1.0" in done.stderr and "could not be set up" in done.stderr.splitlines()[-1]
    assert len(done.stderr.splitlines()) < 20 and done.stdout.splitlines()[-1].endswith("failed")
