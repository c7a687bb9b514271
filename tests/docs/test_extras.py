"""What people are told to install exists: our distribution's name, and extras that pyproject.toml has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from edgefl.system.distribution import NAME, install

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [
    ROOT / "README.md",
    *(ROOT / "docs").rglob("*.md"),
    *(
        file
        for name in ("edgefl", "exporters", "device_runtime", "server", "reproduce")
        for file in (ROOT / name).rglob("*.py")
    ),
]
# In Python's strings the bracket is escaped for rich, in messages the extra may be a variable.
_ASKED = re.compile(r"(edgefl[\w-]*|[\"' ]\.)\\*\[([a-z,]+)\\*\]")


def asked_for(text: str) -> list[tuple[str, str]]:
    """(distribution or ".", extra) of each installation in ``text``."""
    return [
        (name.strip("\"' "), extra) for name, extras in _ASKED.findall(text) for extra in extras.split(",")
    ]


def test_names_and_extras_are_seen_in_commands_and_messages() -> None:
    assert asked_for("pip install 'edgefl-tiers\\\\[server,executorch]'") == [
        ("edgefl-tiers", "server"),
        ("edgefl-tiers", "executorch"),
    ]
    assert asked_for(f'pip install ".[server]" and {install("text")}') == [(".", "server"), (NAME, "text")]
    assert asked_for("edgefl = edges[text]") == []


def test_the_distribution_has_the_name_that_is_told() -> None:
    assert PROJECT["name"] == NAME


def test_every_extra_that_is_told_exists() -> None:
    told = {asked: file for file in TEXTS for asked in asked_for(file.read_text())}

    assert told
    for (name, extra), file in told.items():
        assert name in (NAME, "."), f"{file}: {name}[{extra}]"
        assert extra in PROJECT["optional-dependencies"], f"{file}: {name}[{extra}]"


def test_every_extra_that_code_tells_by_name_exists() -> None:
    called = re.compile(r"install\('([a-z]+)'\)")
    told = {extra for file in TEXTS for extra in called.findall(file.read_text())}

    assert told and told <= PROJECT["optional-dependencies"].keys()
