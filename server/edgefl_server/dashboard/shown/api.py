"""The tables of the page as rows, for JSON and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from edgefl_server.dashboard.known.fleet import Entry, Vital
from edgefl_server.dashboard.shown import rows
from edgefl_server.dashboard.shown.glance import Glance
from edgefl_server.dashboard.shown.rows import DeviceFilter, DeviceRow, RoundSummary, RunRow, TierRow

# Rows as CSV that a spreadsheet may open: text of devices must not become a formula.

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_text(kind: type[msgspec.Struct], rows: Iterable[Any]) -> str:
    """Return ``rows`` of one ``kind`` as CSV, with a line of names first. Nested values are JSON."""
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


Listing = tuple[type[msgspec.Struct], Callable[[Glance, DeviceFilter], list[Any]]]
"""The kind of the rows of a table, and the rows."""

TABLES: dict[str, Listing] = {
    "run": (RunRow, lambda glance, _: [rows.run_row(glance.fleet)]),
    "rounds": (RoundSummary, lambda glance, _: glance.rounds()[::-1]),
    "devices": (
        DeviceRow,
        lambda glance, view: [rows.device_row(glance.fleet, each) for each in view.of(glance.fleet)],
    ),
    "tiers": (TierRow, lambda glance, _: glance.tiers),
    "log": (Entry, lambda glance, _: list(glance.fleet.log)),
    "vitals": (Vital, lambda glance, _: list(glance.fleet.vitals)),
}
