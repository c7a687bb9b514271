"""Construction of a page's hub and order handler from the command line."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from edgefl_server.dashboard.known.source import Folder, Watch
from edgefl_server.dashboard.web.desk import OrderHandler
from edgefl_server.dashboard.web.hub import Hub
from edgefl_server.dashboard.web.serve import check_token, read_token
from edgefl_server.dashboard.web.upstream import Upstream, hand_on
from edgefl_server.operations.mailbox import Mailbox

TOKEN = "EDGEFL_OPERATOR_TOKEN"


def hub_of(run: Path | None, server: str, *, database: str = "", otlp: str = "") -> Hub:
    """Return the hub of the folder ``run``, or of the page at ``server``. ConfigError if that does not exist."""
    watch: Watch | None = None
    if otlp:
        from edgefl_server.dashboard.web.traces import Traces

        watch = Traces(otlp).take
    return Hub(Folder(run, database, watch) if run is not None else Upstream(server, watch))


def order_handler(run: Path | None, server: str, token_file: Path | None) -> OrderHandler:
    """Return the handler of orders: checks a token and writes into ``run``, or forwards to the page at ``server``."""
    if run is None:
        return OrderHandler(partial(hand_on, server.rstrip("/")), elsewhere=True)
    token = os.environ.get(TOKEN, "")
    if token_file is not None:
        token = read_token(token_file)
    elif token:
        token = check_token(token, TOKEN)
    box = Mailbox(run)
    return OrderHandler(lambda order, _: box.give(order), token)
