"""Name, version and extras of the installed distribution. On the package index, edgefl is the name of another project."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

NAME = "edgefl-tiers"


def install(extra: str) -> str:
    """Return the command that installs edgefl with an ``extra`` of pyproject.toml: ``pip install
    'edgefl-tiers[server]'``.
    """
    return f"pip install '{NAME}[{extra}]'"


def version() -> str:
    """Return the release that pyproject.toml of these sources names, else the installed distribution's version, else
    ``unknown``.

    Reads only names of files: ``importlib.metadata`` imports the parser of e-mails, 1.3 MB of an idle device and a
    tenth of its start.
    """
    root = Path(__file__).resolve().parents[2]
    if of_sources := _source_version(root / "pyproject.toml"):
        return of_sources
    # The folder that an installer writes beside our packages.
    names = [folder.name for folder in root.glob(f"{NAME.replace('-', '_')}-*.dist-info")]
    return max(names, default="").removesuffix(".dist-info").rpartition("-")[2] or "unknown"


def series(release: str) -> str:
    """Return the release without its patch: ``0.1`` for ``0.1.3``.

    A run can be resumed under any patch, because patches change no weight. A version before its release (``0.2.0rc1``,
    ``0.2.0.dev4``) promises nothing, and is returned whole.
    """
    return re.sub(r"^(\d+\.\d+)\.\d+$", r"\1", release)


def _source_version(project: Path) -> str:
    """Return the default version in our own pyproject.toml; "" if there is none, or it is another project's."""
    try:
        text = project.read_text(encoding="utf-8")
    except OSError:
        return ""
    import tomllib

    tables = tomllib.loads(text)
    ours = tables.get("project", {}).get("name") == NAME
    return str(tables["tool"]["versioningit"]["default-version"]) if ours else ""


PACKAGES = ("edgefl", "edgefl_export", "edgefl_device", "edgefl_server")
"""The packages of this distribution."""


def folders(*packages: str) -> tuple[Path, ...]:
    """Return the folders of the top-level packages named, without importing them. Those that are not installed are left
    out.
    """
    specs = map(find_spec, packages)
    return tuple(Path(spec.origin).resolve().parent for spec in specs if spec is not None and spec.origin)
