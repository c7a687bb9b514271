"""Complete pages for the first response. They work without a script; the script then applies changes."""

from __future__ import annotations

from edgefl_server.dashboard.state.fleet import Fleet
from edgefl_server.dashboard.views import parts
from edgefl_server.dashboard.views.boards import PageContents
from edgefl_server.dashboard.views.html import Html, device_path, el, join_children, link, table
from edgefl_server.dashboard.views.summary import STATES, DeviceFilter

CHARTS = {
    "score": "metric of the model by round",
    "loss": "loss by round",
    "fates": "devices by round",
    "time": "time until the report by round, median of each tier",
    "bytes": "bytes by round and tier, up and down (dashed)",
    "seconds": "time until the report of each device, newest round",
    "step": "time of a training step of each device, newest round",
    "lag": "delay of messages at the server, and of confirmations by the broker",
    "staleness": "versions that updates were behind, last 20 rounds",
}
_TABLES = ("rounds", "evaluations", "devices", "tiers", "log", "vitals")


def overview(fleet: Fleet, board: PageContents, view: DeviceFilter, *, orders: bool) -> Html:
    """Return the overview page of the run and its fleet.

    Args:
        fleet: State of the run.
        board: Contents from :func:`edgefl_server.dashboard.views.boards.overview`.
        view: Filter of devices, shown in the form.
        orders: True to include the operator's form.
    """
    rounds = list(board.tables["rounds"].values())
    return _page(
        fleet,
        board,
        el("section", *(_chart(name, text) for name, text in CHARTS.items()), class_="charts", aria_label="charts"),
        el("section", el("h2", "Rounds"), table("rounds", "the newest rounds", parts.ROUND_COLUMNS, rounds)),
        el(
            "section",
            el("h2", "Tiers"),
            table("tiers", "newest evaluation, memory over the idle process, time and bytes of the newest reports, by tier",
                  parts.TIER_COLUMNS, list(board.tables["tiers"].values())),
        ),
        el(
            "section",
            el("h2", "Devices"),
            _filter(fleet, view),
            el("p", board.pieces["pager"], id="pager"),
            table("devices", "devices", parts.DEVICE_COLUMNS, list(board.tables["devices"].values())),
            id="fleet",
        ),
        _log(board),
        _operator(board) if orders else None,
        _exports(),
        live="overview",
    )  # fmt: skip


def device(fleet: Fleet, name: str, board: PageContents) -> Html:
    """Return the page of device ``name``, with the contents of its ``board``."""
    rounds = list(board.tables.get("parts", {}).values())
    return _page(
        fleet,
        board,
        el(
            "section",
            el("h2", "Its rounds"),
            table("parts", f"rounds of {name}", parts.PARTS_OF_DEVICE, rounds),
        ),
        _log(board),
        el("p", *_downloads(f"{_api(name)}/rounds"), "; log: ", *_downloads(f"{_api(name)}/log")),
        title=name,
        live="device",
    )


def round_(fleet: Fleet, number: int, board: PageContents) -> Html:
    """Return the page of round ``number``, with the contents of its ``board``."""
    rounds = list(board.tables.get("rounds", {}).values())
    devices = list(board.tables.get("parts", {}).values())
    return _page(
        fleet,
        board,
        el("section", table("rounds", f"round {number}", parts.ROUND_COLUMNS, rounds)),
        el("section", board.pieces.get("evaluation"), id="evaluation"),
        el(
            "section",
            el("h2", "Its devices"),
            table("parts", f"devices of round {number}", parts.PARTS_OF_ROUND, devices),
        ),
        el("p", *_downloads(f"/api/rounds/{number}")),
        title=f"round {number}",
        live="round",
    )


def missing(what: str) -> Html:
    """Return the page for a path that does not exist. ``what`` is the text that explains it."""
    return _document(
        "not here", el("main", el("h1", "not here"), el("p", what), el("p", link("/", "the fleet")))
    )


def _page(fleet: Fleet, board: PageContents, *sections: Html | None, title: str = "", live: str) -> Html:
    name = fleet.federation or "edgefl"
    return _document(
        f"{title} - {name}" if title else name,
        join_children(
            link("#fleet" if live == "overview" else "#main", "to the devices", class_="skip"),
            el("header", board.pieces["head"], id="head"),
            el(
                "main",
                el("h2", title) if title else None,
                el("dl", board.pieces["tiles"], id="tiles", class_="tiles"),
                *(section for section in sections if section is not None),
                id="main",
            ),
            el("p", "", id="link", role="status", class_="bad"),
        ),
        live,
    )


def _document(title: str, content: Html, live: str = "") -> Html:
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("link", rel="icon", href="data:,"),
        el("link", rel="stylesheet", href="/static/uPlot.min.css"),
        el("link", rel="stylesheet", href="/static/page.css"),
        el("script", src="/static/uPlot.iife.min.js", defer=True) if live == "overview" else None,
        el("script", src="/static/charts.js", defer=True) if live == "overview" else None,
        el("script", src="/static/page.js", defer=True) if live else None,
    )
    return join_children(
        Html("<!doctype html>"), el("html", head, el("body", content, data_live=live), lang="en")
    )


def _chart(name: str, text: str) -> Html:
    return el(
        "figure",
        el("figcaption", text),
        el("div", class_="plot"),
        class_="chart",
        data_chart=name,
        hidden=True,
    )


def _filter(fleet: Fleet, view: DeviceFilter) -> Html:
    tiers = sorted({device.tier for device in fleet.devices.values() if device.tier} | set(fleet.tiers))
    return el(
        "form",
        el(
            "label",
            "name ",
            el("input", type="search", name="q", value=view.q, placeholder="part of a name (/)"),
        ),
        el("label", "tier ", _select("tier", tiers, view.tier)),
        el("label", "state ", _select("state", STATES, view.state)),
        el("button", "show"),
        id="filter",
        action="/#fleet",
        role="search",
    )


def _select(name: str, values: list[str] | tuple[str, ...], chosen: str) -> Html:
    options = [el("option", value, value=value, selected=value == chosen) for value in values]
    return el("select", el("option", "all", value=""), *options, name=name)


def _log(board: PageContents) -> Html:
    lines = board.tables.get("log", {}).values()
    return el(
        "section", el("h2", "Log"), el("ol", *lines, id="log", class_="log", tabindex=0, aria_label="log")
    )


def _operator(board: PageContents) -> Html:
    versions = board.pieces["versions"]
    return el(
        "details",
        el("summary", "Operator"),
        el(
            "form",
            el("label", "token ", el("input", type="password", name="token", autocomplete="off")),
            el("button", "pause", type="button", data_order="pause"),
            el("button", "resume", type="button", data_order="resume"),
            el("button", "drain", type="button", data_order="drain"),
            el("label", "round ", el("select", versions, name="version", id="versions")),
            el("button", "roll back", type="button", data_order="rollback"),
            el("output", "", name="answer"),
            id="operator",
        ),
    )


def _exports() -> Html:
    links = [join_children(name, ": ", *_downloads(f"/api/{name}"), "; ") for name in _TABLES]
    return el("footer", el("p", "All of it: ", *links, link("/metrics", "Prometheus")))


def _downloads(path: str) -> tuple[Html | str, ...]:
    return link(f"{path}.csv", "CSV"), " ", link(f"{path}.json", "JSON")


def _api(name: str) -> str:
    return "/api" + device_path(name)
