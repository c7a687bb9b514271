"""Texts for messages: the other side's own words so that they fit any log, and the right name for a wrong one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

MOST_TEXT = 1000
"""Letters of what the other side says that are told."""


def cleaned(text: str) -> str:
    """Return ``text`` with a blank for each character that steers a terminal. Line ends stay."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def printable(text: str, most: int = MOST_TEXT) -> str:
    """At most ``most`` letters of ``text``; what belongs in no line (escapes, line ends, marks of direction) is a blank."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:most])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'sgd'?`` for the known name that is most like ``name``, empty if none is."""
    from difflib import get_close_matches  # idle devices are to be small

    names = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {names[found[0]]!r}?" if found else ""


def unknown(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Return ``fetch_windw: unknown key; did you mean 'fetch_window'?`` for each of ``names`` that is not known."""
    return [f"{name}: unknown key{nearest(name, known)}" for name in names if name not in known]


def similar(path: Path) -> str:
    """Return ``; did you mean 'runs/first'?`` for the most similar existing path of the same type."""
    suffixes = (".npy", ".npz") if path.suffix in (".npy", ".npz") else (path.suffix,)
    try:
        there = [str(path.with_name(each.name)) for each in path.parent.iterdir() if each.suffix in suffixes]
    except (OSError, ValueError):
        return ""
    return nearest(str(path), there)
