"""Test processes of a fresh checkout compile what they import by parts: each begins with another one, and finds the rest."""

from __future__ import annotations

import importlib
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def import_by_turns(config: pytest.Config) -> None:
    """Import all test modules before they are collected, where one of several processes runs all tests. Errors are left to
    the collection, which imports again what failed."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.option.file_or_dir:
        return
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
    ]
    for name in turned(names, int(worker["workerid"].removeprefix("gw")), worker["workercount"]):
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def turned(names: list[str], number: int, count: int) -> list[str]:
    """``names`` from the first of part ``number`` of ``count`` on, and then those before it."""
    first = len(names) * number // count
    return names[first:] + names[:first]
