"""The version is told with and without an installation, from the same one place."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from edgefl.system import distribution
from tests.support.commands import run_python

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in which the packages seem to lie."""
    monkeypatch.setattr(distribution, "__file__", str(tmp_path / "edgefl" / "system" / "distribution.py"))
    return tmp_path


def test_sources_have_the_version_of_their_project_file() -> None:
    project = tomllib.loads(PYPROJECT.read_text())
    assert distribution.version() == project["tool"]["versioningit"]["default-version"]


def test_conformance_kit_and_browser_agent_have_the_same_version() -> None:
    root = PYPROJECT.parent
    kit = tomllib.loads((root / "conformance/pyproject.toml").read_text())["project"]["version"]
    page, lock = (
        json.loads((root / "agents/web" / name).read_text()) for name in ("package.json", "package-lock.json")
    )
    assert {kit, page["version"], lock["version"], lock["packages"][""]["version"]} == {
        distribution.version()
    }


def test_an_installation_has_the_version_that_its_installer_wrote(elsewhere: Path) -> None:
    (elsewhere / "edgefl_tiers-3.2.1.dist-info").mkdir()
    (elsewhere / "edgefl_tiers_more-9.9.dist-info").mkdir()

    assert distribution.version() == "3.2.1"


def test_another_project_s_file_says_nothing_of_our_version(elsewhere: Path) -> None:
    (elsewhere / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "7"\n')

    assert distribution.version() == "unknown"


def test_a_copy_without_a_project_file_has_an_unknown_version(elsewhere: Path) -> None:
    assert distribution.version() == "unknown"


def test_a_device_loads_nothing_that_reads_e_mail() -> None:
    script = (
        "import sys; from edgefl.cli.device.process import load; load()\n"
        "import edgefl_device.engine.onnx; from edgefl_device.host import agent_version\n"
        "agent_version(); print(sorted({'email', 'importlib.metadata', 'statistics'} & set(sys.modules)))"
    )
    ended = run_python("-c", script, check=True)

    assert ended.stdout.strip() == "[]"
