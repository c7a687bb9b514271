"""The right name for a wrong one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'sgd'?`` for the known name that is most like ``name``, empty if none is."""
    names = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {names[found[0]]!r}?" if found else ""


def similar(path: Path) -> str:
    """Return ``; did you mean 'runs/first'?`` for the most similar existing path of the same type."""
    suffixes = (".npy", ".npz") if path.suffix in (".npy", ".npz") else (path.suffix,)
    try:
        there = [str(path.with_name(each.name)) for each in path.parent.iterdir() if each.suffix in suffixes]
    except (OSError, ValueError):
        return ""
    return nearest(str(path), there)
