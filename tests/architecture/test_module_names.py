"""Modules that code names in strings, such as those of processes that it starts: each of them exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "edgefl": ROOT,
    "edgefl_export": ROOT / "exporters",
    "edgefl_device": ROOT / "device_runtime",
    "edgefl_server": ROOT / "server",
    "benchmarks": ROOT,
    "reproduce": ROOT,
    "edgefl_conformance": ROOT / "conformance",
}
"""The folder that holds each package."""
_QUOTED = re.compile(rf"[\"'](?:{'|'.join(FOLDERS)})\.")
_MODULE = re.compile(rf"({'|'.join(FOLDERS)})(\.[a-z_][a-z0-9_]*)+(:[A-Za-z_]\w*)?")


def test_modules_that_are_named_in_strings_exist() -> None:
    names = {
        name: path
        for package, folder in FOLDERS.items()
        for path in (folder / package).rglob("*.py")
        for name in _named(path)
    }

    assert "benchmarks.workers.step" in names
    assert {name: path for name, path in names.items() if not _exists(name)} == {}


def _named(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if _QUOTED.search(text) else ():
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if _MODULE.fullmatch(node.value) and not node.value.endswith(".md"):
            yield node.value.partition(":")[0]


def _exists(name: str) -> bool:
    package, *inside = name.split(".")
    path = FOLDERS[package].joinpath(package, *inside)
    return path.is_dir() or path.with_suffix(".py").is_file()
