"""HTML of reports: one look for all pages, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}svg{max-width:100%;height:auto}"
    "td,th{padding:.25rem .7rem;text-align:right;vertical-align:top;border-bottom:1px solid #8886}"
    "td:first-child,th:first-child{text-align:left}"
    "@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}}"
)


def document(title: str, parts: Sequence[str], *, style: str = "", head: str = "") -> str:
    """Return a whole page under the heading ``title``. ``style`` is added to the CSS that all pages have."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}<title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}{style}</style></head>'
        f"<body><h1>{escape(title)}</h1>" + "\n".join(parts) + "</body></html>\n"
    )


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
