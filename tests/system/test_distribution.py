"""The version is told with and without an installation, from the same one place."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from edgefl.system import distribution

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def nowhere(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_sources_that_are_not_installed_have_the_version_of_their_project_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", nowhere)

    assert distribution.version() == tomllib.loads(PYPROJECT.read_text())["project"]["version"]


def test_a_copy_without_a_project_file_has_an_unknown_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metadata, "version", nowhere)
    monkeypatch.setattr(distribution, "__file__", str(tmp_path / "edgefl" / "system" / "distribution.py"))

    assert distribution.version() == "unknown"
