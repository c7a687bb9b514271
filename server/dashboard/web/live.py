"""What open pages are sent while a run goes on: what changed since they last were told, once a second at most."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from server.dashboard.shown.boards import Board, Look
from server.dashboard.shown.glance import Charts, Glance
from server.dashboard.shown.html import Html
from server.dashboard.web.hub import Hub

PAUSE_S = 1.0
_HEARTBEAT_S = 15.0
RETRY_MS = 2000
"""After so long a browser asks again, if the page's process is gone."""


class News(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``html``: contents of elements by id; ``rows``: of tables, by id and key; ``order``: the keys of a table that has
    other rows than before, all of them."""

    html: dict[str, str] = {}
    rows: dict[str, dict[str, str]] = {}
    order: dict[str, list[str]] = {}
    charts: Charts | None = None


class Listener:
    """One open page: what it shows, and what it was sent."""

    def __init__(self, look: Look, *, charts: bool) -> None:
        self._look = look
        self._charts = charts
        self._sent = Board()
        self._tick = 0
        self._vitals = 0
        self._edition = -1

    def news(self, glance: Glance) -> News | None:
        """What it has not been sent; None if that is nothing."""
        board = self._look(glance)
        html = _changed(board.pieces, self._sent.pieces)
        rows = {name: _changed(each, self._sent.tables.get(name, {})) for name, each in board.tables.items()}
        order = {
            name: list(each)
            for name, each in board.tables.items()
            if name not in self._sent.tables or list(each) != list(self._sent.tables[name])
        }
        self._sent = board
        rows = {name: each for name, each in rows.items() if each}
        charts = self._new_charts(glance) if self._charts else None
        if not (html or rows or order or charts):
            return None
        return News(html=html, rows=rows, order=order, charts=charts)

    def _new_charts(self, glance: Glance) -> Charts | None:
        fleet = glance.fleet
        if (fleet.tick, fleet.edition) == (self._tick, self._edition):
            return None
        since = self._tick if fleet.edition == self._edition else 0
        charts = glance.charts(since, self._vitals if since else 0)
        self._tick, self._edition = fleet.tick, fleet.edition
        self._vitals = fleet.vitals[-1].n if fleet.vitals else 0
        return charts


def _changed(now: dict[str, Html], before: dict[str, Html]) -> dict[str, str]:
    return {key: str(each) for key, each in now.items() if before.get(key) != each}


async def stream(hub: Hub, look: Look, *, charts: bool) -> AsyncGenerator[bytes]:
    """Server-sent events for a page that shows ``look``."""
    listener = Listener(look, charts=charts)
    yield b"retry: %d\n\n" % RETRY_MS
    quiet = 0.0
    while not hub.ending:
        news = listener.news(hub.glance)
        if news is not None:
            yield b"data: " + msgspec.json.encode(news) + b"\n\n"
            quiet = 0.0
        elif quiet >= _HEARTBEAT_S:
            yield b": still here\n\n"
            quiet = 0.0
        await hub.pause(PAUSE_S)
        quiet += PAUSE_S
