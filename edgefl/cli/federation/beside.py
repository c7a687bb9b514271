"""The fleet's page beside a run: a process of its own, whose end changes nothing in the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.federation.web import DEFAULT as WEB_DEFAULT
from edgefl.cli.federation.web import FLAG as WEB_FLAG
from edgefl.cli.federation.web import PAGES, page_process
from edgefl.cli.output import errors

FLAG = "--dashboard"
DEFAULT = "127.0.0.1:8090"
_PLACE = re.compile(r"([^/\s]*:)?\d{1,5}")

Dashboard = Annotated[
    str,
    typer.Option(
        FLAG,
        rich_help_panel=PAGES,
        metavar="[HOST:PORT]",
        help=f"show the fleet in a browser meanwhile (`edgefl dashboard`); by default at {DEFAULT}",
    ),
]


_PLACES = {FLAG: DEFAULT, WEB_FLAG: WEB_DEFAULT}


def with_place(arguments: Sequence[str]) -> list[str]:
    """The words of a command line, where ``--dashboard`` and ``--web`` are followed by an address: by the default one if by
    none."""
    found: list[str] = []
    for at, word in enumerate(arguments):
        found.append(word)
        following = arguments[at + 1] if at + 1 < len(arguments) else ""
        if word in _PLACES and not _PLACE.fullmatch(following):
            found.append(_PLACES[word])
    return found


@contextmanager
def page_beside(listen: str, folder: Path, database: str = "") -> Iterator[None]:
    """Serve the page of ``folder`` at ``listen`` while the block runs; nothing if that is empty.

    Output of the page's process is in ``logs/dashboard.log``.

    Raises:
        ConfigError: the address cannot be listened on. Raised before anything is started.
    """
    if not listen:
        yield
        return
    from edgefl_server.dashboard.web.serve import bind, is_loopback, parse_listen, url_of
    from edgefl_server.storage import feed

    host, port = parse_listen(listen)
    with bind(host, port) as tried:
        url, port = url_of(tried), tried.getsockname()[1]
    feed.begin(folder)
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    arguments = ["edgefl", "dashboard", str(folder), "--listen", place]
    own = {"EDGEFL_DATABASE": database} if database else {}
    open_to_all = "" if is_loopback(host) else ", which anybody who reaches this machine may read"
    with page_process(arguments, folder / "logs" / "dashboard.log", "the fleet's page", b"", **own):
        errors.print(f"the fleet's page: {url}{open_to_all}")
        yield
