"""Rows as CSV that a spreadsheet may open: what devices said is text there, and no formula."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

import msgspec

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_text(kind: type[msgspec.Struct], rows: Iterable[Any]) -> str:
    """A line of names and one for each of ``rows``, all of ``kind``. What is nested is JSON."""
    out = io.StringIO()
    names = kind.__struct_fields__
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(names)
    writer.writerows([_cell(getattr(row, name)) for name in names] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return f"'{text}" if text.startswith(_FORMULAS) else text
