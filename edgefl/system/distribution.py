"""The distribution that these packages are installed by. On the package index, edgefl is another project's name."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

NAME = "edgefl-tiers"


def install(extra: str) -> str:
    """The command that brings what ``extra`` of pyproject.toml lists: ``pip install 'edgefl-tiers[server]'``."""
    return f"pip install '{NAME}[{extra}]'"


def version() -> str:
    """The installed version; of sources that are not installed what their pyproject.toml says; else ``unknown``."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        import tomllib

    try:
        project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    except OSError:
        return "unknown"
    return str(tomllib.loads(project)["project"]["version"])
