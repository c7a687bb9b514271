"""From what the command line says to a page's source and its desk."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from edgefl_server.dashboard.known.source import Folder, Watch
from edgefl_server.dashboard.web.desk import Desk
from edgefl_server.dashboard.web.hub import Hub
from edgefl_server.dashboard.web.serve import check_token, read_token
from edgefl_server.dashboard.web.upstream import Upstream, hand_on
from edgefl_server.operations.mailbox import Mailbox

TOKEN = "EDGEFL_OPERATOR_TOKEN"


def hub_of(run: Path | None, server: str, *, database: str = "", otlp: str = "") -> Hub:
    """What the page shows: the folder ``run``, or the page at ``server``. ConfigError where there is none."""
    watch: Watch | None = None
    if otlp:
        from edgefl_server.dashboard.web.traces import Traces

        watch = Traces(otlp).take
    return Hub(Folder(run, database, watch) if run is not None else Upstream(server, watch))


def desk_of(run: Path | None, server: str, token_file: Path | None) -> Desk:
    """Where orders go: into the folder with a token that is known here, or on to the page that is followed."""
    if run is None:
        return Desk(partial(hand_on, server.rstrip("/")), elsewhere=True)
    token = os.environ.get(TOKEN, "")
    if token_file is not None:
        token = read_token(token_file)
    elif token:
        token = check_token(token, TOKEN)
    box = Mailbox(run)
    return Desk(lambda order, _: box.give(order), token)
