"""Contents of each page, as named pieces: a page starts with all of them, and then receives those that change."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlencode

from edgefl_server.dashboard.views import parts, summary
from edgefl_server.dashboard.views.html import Html, el, join_children
from edgefl_server.dashboard.views.summary import PAGE, DeviceFilter, FleetSnapshot

ROUNDS_SHOWN, LOG_SHOWN = 12, 40


@dataclass(frozen=True)
class PageContents:
    """Contents of a page. Only pieces that changed are sent to an open page.

    Attributes:
        pieces: Contents of elements by element id.
        tables: Rows or lines by element id and row key.
    """

    pieces: dict[str, Html] = field(default_factory=dict)
    tables: dict[str, dict[str, Html]] = field(default_factory=dict)


def overview(glance: FleetSnapshot, view: DeviceFilter) -> PageContents:
    """Return the contents of the overview page, with one page of the devices that ``view`` selects."""
    fleet = glance.fleet
    matching = view.of(fleet)
    pages = max(1, -(-len(matching) // PAGE))
    page = min(max(1, view.page), pages)
    query = urlencode({name: value for name in ("q", "tier", "state") if (value := getattr(view, name))})
    shown = matching[(page - 1) * PAGE : page * PAGE]
    board = _frame(glance)
    board.pieces["versions"] = parts.versions(fleet)
    board.pieces["pager"] = parts.pager(fleet, len(matching), page, pages, query)
    board.tables["devices"] = {
        device.name: parts.device(summary.device_row(fleet, device)) for device in shown
    }
    board.tables["rounds"] = {str(row.round): parts.round_(row) for row in glance.rounds(last=ROUNDS_SHOWN)}
    board.tables["tiers"] = {row.tier: parts.tier(row) for row in glance.tiers}
    newest = list(fleet.log)[-LOG_SHOWN:]
    board.tables["log"] = {str(each.n): parts.entry(each) for each in reversed(newest)}
    return board


def device(glance: FleetSnapshot, name: str) -> PageContents:
    """Return the contents of the page of device ``name``: its state, its properties, its rounds and its log.

    For an unknown device it is only the frame with the run's figures.
    """
    board = _frame(glance)
    found = glance.fleet.devices.get(name)
    if found is None:
        return board
    row = summary.device_row(glance.fleet, found)
    facts = found.facts
    properties: list[tuple[str, str]] = [
        ("tier", row.tier),
        ("state", row.state),
        ("stage", row.stage),
        ("reports", str(row.reports)),
        ("missed", str(row.missed)),
    ]
    if facts is not None:
        properties += [
            ("agent", facts.agent),
            ("memory", parts.size_of(facts.memory_bytes)),
            ("cores", str(facts.cores or "")),
            ("samples", str(facts.samples)),
            ("engines", ", ".join(f"{engine} {version}" for engine, version in facts.engines.items())),
        ]
    properties += [(f"cannot run {graph}", why) for graph, why in found.dropped.items()]
    board.pieces["tiles"] = join_children(
        *(el("div", el("dt", key), el("dd", value or "-")) for key, value in properties)
    )
    board.tables["parts"] = {
        str(number): parts.part(found.parts[number]) for number in sorted(found.parts, reverse=True)[:200]
    }
    board.tables["log"] = {str(each.n): parts.entry(each) for each in reversed(found.log)}
    return board


def round_(glance: FleetSnapshot, number: int) -> PageContents:
    """Return the contents of the page of round ``number``: the round and the state of each of its devices.

    For an unknown round it is only the frame with the run's figures.
    """
    board = _frame(glance)
    found = glance.fleet.rounds.get(number)
    if found is None:
        return board
    board.tables["rounds"] = {str(number): parts.round_(glance.round(number))}
    board.pieces["evaluation"] = parts.evaluation(found.evaluation)
    board.tables["parts"] = {
        name: parts.part(each, by_device=True) for name, each in sorted(found.parts.items())
    }
    return board


def _frame(glance: FleetSnapshot) -> PageContents:
    run = summary.run_row(glance.fleet)
    return PageContents({"head": parts.head(run), "tiles": parts.tiles(run)}, {})
