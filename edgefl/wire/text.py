"""Text for people: untrusted text made safe for logs, suggestions for misspelled names, and formatted metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_TEXT = 1000
"""Most letters of an untrusted text that are shown."""


def clean_text(text: str) -> str:
    """Return ``text`` with each control character replaced by a blank. Line ends are kept."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def printable(text: str, most: int = MOST_TEXT) -> str:
    """Return the first ``most`` characters of ``text``, with line ends and all other unprintable characters replaced by
    blanks.
    """
    return "".join(letter if letter.isprintable() else " " for letter in text[:most])


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'sgd'?`` with the known name most similar to ``name``, or "" if none is similar."""
    from difflib import get_close_matches  # idle devices are to be small

    names = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {names[found[0]]!r}?" if found else ""


def describe_unknown(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Return a line like ``fetch_windw: unknown key; did you mean 'fetch_window'?`` for each of ``names`` that is not in
    ``known``.
    """
    return [f"{name}: unknown key{suggest(name, known)}" for name in names if name not in known]


def similar(path: Path) -> str:
    """Return ``; did you mean 'runs/first'?`` with the existing path most similar to ``path``, or "" if none is similar.

    Only paths with the same suffix in the same folder are compared.
    """
    suffixes = (".npy", ".npz") if path.suffix in (".npy", ".npz") else (path.suffix,)
    try:
        there = [str(path.with_name(each.name)) for each in path.parent.iterdir() if each.suffix in suffixes]
    except (OSError, ValueError):
        return ""
    return suggest(str(path), there)


SHARES = frozenset({"accuracy", "f1", "iou"})
"""Metrics from 0 to 1, shown as percent. A larger value is better for these, a smaller one for all others."""


def metric_value(name: str, value: float, digits: int = 1) -> str:
    """Return a metric's value as text, such as ``81.2%`` or ``34.7``.

    Args:
        name: Name of the metric. Those in :data:`SHARES` become percentages.
        value: Value of the metric; a share is from 0 to 1.
        digits: Digits after the point of a percentage. Other values have four significant digits.
    """
    return f"{value:.{digits}%}" if name in SHARES else f"{value:.4g}"


def metric_text(name: str, value: float) -> str:
    """Return a metric's name and value as text, such as ``accuracy 81.2%`` or ``mae 0.213``."""
    return f"{name} {metric_value(name, value)}"


def headline_metric(event: Mapping[str, Any]) -> str:
    """Return the headline metric of a round's or run's event as text, or "" if the event has no value for it.

    Args:
        event: Event. ``metric`` names the metric (default ``accuracy``); its value is in ``metrics`` or under its own
            name.
    """
    name = event.get("metric") or "accuracy"
    value = event.get("metrics", {}).get(name, event.get(name))
    return "" if value is None else metric_text(name, value)


MEASURED = "statistics of batch norm measured on devices"
"""Result of a round in which devices measured them."""


def round_result(event: Mapping[str, Any]) -> str:
    """Return the headline metric of a closed round as text, the result on devices, or ``not evaluated``.

    Args:
        event: Row or event of the round, as plain values.
    """
    if found := event.get("evaluation"):
        return device_result(found)
    if event.get("measures"):
        return MEASURED
    return headline_metric(event) or "not evaluated"


def device_result(evaluation: Mapping[str, Any]) -> str:
    """Return ``on devices: accuracy 78.2%, median 75.5%, worst decile 65.4%, 5 devices``.

    Args:
        evaluation: Results of an evaluation round (:class:`edgefl_server.events.DeviceEvaluation`), as plain values.
    """
    group, name = evaluation["devices"], evaluation["metric"]
    if group is None:
        return "on devices: too few to be shown"
    shown = (("metrics", name), ("median", "median"), ("worst_decile", "worst decile"))
    values = [f"{label} {metric_value(name, group[key][name])}" for key, label in shown if name in group[key]]
    return f"on devices: {', '.join([*values, count_text(group['devices'], 'device')])}"


def count_text(count: int, noun: str) -> str:
    """Return ``1 device`` or ``2 devices``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def notebook_table(title: str, rows: Sequence[Mapping[str, object]]) -> str:
    """Return an HTML table for notebooks. All texts are escaped.

    Args:
        title: Caption of the table.
        rows: Values by column. The keys of the first row are the columns.
    """
    import html  # idle devices are to be small

    names = list(rows[0]) if rows else []
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    cells = [[html.escape(str(row.get(name, ""))) for name in names] for row in rows]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
    return f"<table><caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
