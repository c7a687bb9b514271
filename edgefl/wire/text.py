"""Text for people: untrusted text made safe for logs, suggestions for misspelled names, and formatted metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_TEXT = 1000
"""Most letters of an untrusted text that are shown."""


def cleaned(text: str) -> str:
    """Return ``text`` with a blank for each control character of a terminal. Line ends stay."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def printable(text: str, most: int = MOST_TEXT) -> str:
    """Return at most ``most`` letters of ``text`` in one line, with blanks for escapes, line ends and direction marks."""
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


SHARES = frozenset({"accuracy", "f1", "iou"})
"""Metrics from 0 to 1, shown as percent. A larger value is better for these, a smaller one for all others."""


def metric_value(name: str, value: float, digits: int = 1) -> str:
    """Return the value of a metric as text: ``81.2%``, ``34.7``."""
    return f"{value:.{digits}%}" if name in SHARES else f"{value:.4g}"


def metric_text(name: str, value: float, digits: int = 1) -> str:
    """Return a metric with its name: ``accuracy 81.2%``, ``perplexity 34.7``, ``mae 0.213``."""
    return f"{name} {metric_value(name, value, digits)}"


def headline_metric(told: Mapping[str, Any]) -> str:
    """Return the task's metric of an event of a round or run as text, or "" if nothing was evaluated."""
    name = told.get("metric") or "accuracy"
    value = told.get("metrics", {}).get(name, told.get(name))
    return "" if value is None else metric_text(name, value)


def notebook_table(title: str, rows: Sequence[Mapping[str, object]]) -> str:
    """Return an HTML table of ``rows``, whose columns are the keys of the first; nothing in it is taken as HTML."""
    import html  # idle devices are to be small

    names = list(rows[0]) if rows else []
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    cells = [[html.escape(str(row.get(name, ""))) for name in names] for row in rows]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
    return f"<table><caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
