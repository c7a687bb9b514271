"""Tables of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape


def table(rows: Sequence[Mapping[str, str]], kind: str = "") -> str:
    """Return a table of ``rows`` with equal keys, of the CSS class ``kind``; empty without a row."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    named = f' class="{kind}"' if kind else ""
    return f"<table{named}><tr>{head}</tr>{body}</table>"
