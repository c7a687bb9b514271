"""Small tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence


def table(title: str, rows: Sequence[Mapping[str, object]]) -> str:
    """Return an HTML table of ``rows``, whose columns are the keys of the first; nothing in it is taken as HTML."""
    names = list(rows[0]) if rows else []
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    cells = [[html.escape(str(row.get(name, ""))) for name in names] for row in rows]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
    return f"<table><caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
