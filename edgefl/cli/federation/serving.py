"""Process of `edgefl server`: its settings, and the loop that prints events."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgefl.cli.federation.lines import RepeatedTexts
from edgefl.system.clock import clock
from edgefl.system.lazy_modules import not_here, on_first_use
from edgefl.wire.text import printable
from edgefl_server.torch_process.process import Process

if TYPE_CHECKING:
    from edgefl.config import Federation
    from edgefl_server.events import Event


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the process of `edgefl server`: the arguments of :class:`edgefl.Server`.

    ``given``: keys that replace those of the federation file, unless they are empty. ``web``: the fields of
    :class:`edgefl.cli.federation.web.WebOptions`. ``as_json``: True to print events as JSON lines.
    """

    config: str
    out: str
    broker: str = ""
    given: dict[str, str | bool | int | list[str]] = {}
    database: str = ""
    device: str = "auto"
    sign_key: str = ""
    enrolled: str = ""
    dashboard: str = ""
    web: tuple[str, str, str, str] = ("", "", "", "")
    as_json: bool = False
    evaluate: bool = False
    statistics: str = ""


def load() -> Process:
    """Import the modules of a server before its settings are known.

    Return a process that imports torch at the same time, which takes seconds.
    """
    process = Process()
    on_first_use("urllib.request")  # of paho: see edgefl.cli.device.process
    not_here("coverage", "scipy")  # numba would take 18 MB for them
    import edgefl_server.torch_process.client  # noqa: F401

    return process


def run(settings: ServerSettings, process: Process) -> None:
    """Run the server until all rounds are over, or SIGTERM or SIGINT arrives.

    Args:
        settings: Settings of the command.
        process: Process with torch, from :func:`load`.

    Raises:
        StoreError: Another process serves from the same folder.
        ConfigError: A setting cannot be used.
        EdgeflError: The server cannot continue, for example without a broker.
    """
    from edgefl.api.serve import Server
    from edgefl.config import load as load_federation
    from edgefl.wire.mqtt.address import Address
    from edgefl.wire.statistics import StatisticsRequest
    from edgefl_server.torch_process.client import TorchProcess

    config = Path(settings.config)
    say = _as_json if settings.as_json else partial(_say, repeats=RepeatedTexts())
    given: dict[str, object] = {key: value for key, value in settings.given.items() if value}
    if (
        settings.broker and "broker.password_file" in given
    ):  # the file holds the password of the address's user
        named = Address.parse(settings.broker)
        given |= {"broker.username": named.username} if named.username else {}
        settings = msgspec.structs.replace(settings, broker=replace(named, password="").url)
    if (password := os.environ.get("EDGEFL_BROKER_PASSWORD", "")) and "broker.password_file" not in given:
        given["broker.password"] = password
    request = (
        msgspec.json.decode(settings.statistics, type=StatisticsRequest) if settings.statistics else None
    )
    with TorchProcess(process) as torch_process:
        federation = load_federation(config, given)
        with _page(settings), _web(settings, federation):
            served = Server(
                federation,
                settings.out,
                broker=settings.broker,
                database=settings.database,
                device=settings.device,
                sign_key=settings.sign_key or None,
                enrolled=settings.enrolled or None,
                emit=say,
                torch_process=None if request else torch_process,
                evaluate=request or settings.evaluate,
            )
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: served.stop())
            served.run()


def _page(settings: ServerSettings) -> AbstractContextManager[None]:
    """Return a context that serves the dashboard if --dashboard is given, else an empty context."""
    if not settings.dashboard:
        return nullcontext()
    from edgefl.cli.federation.web import page_beside

    return page_beside(settings.dashboard, Path(settings.out), settings.database)


def _web(settings: ServerSettings, federation: Federation) -> AbstractContextManager[None]:
    """Return a context that serves the page for browsers if --web is given, else an empty context."""
    if not any(settings.web):
        return nullcontext()
    from edgefl.api.serve import reached_at
    from edgefl.cli.federation.web import WebOptions, web_beside
    from edgefl.wire import folders
    from edgefl.wire.keys import KeyPair

    options = WebOptions(*settings.web)
    options.check()
    folder = Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    key = Path(settings.sign_key) if settings.sign_key else folders.server_key(federation.federation.name)
    broker = reached_at(federation, settings.broker)
    return web_beside(options, folder, federation, broker, KeyPair(key).public_key, code=not settings.as_json)


settings_type = ServerSettings


def say_start(config: Path, folder: Path, *, as_json: bool) -> None:
    """Print that the server starts, before slow imports. Print nothing if ``as_json``."""
    if not as_json:
        _print(
            f"{clock(time.time())}  starting: {config}, folder {folder}; loading torch and the compiler takes a while"
        )


def _as_json(event: Event) -> None:
    _print(msgspec.json.encode(event).decode())


def _say(event: Event, repeats: RepeatedTexts | None = None) -> None:
    """Print an event as one line. Progress of devices is not printed."""
    from edgefl.cli.federation.lines import line

    text = line(event, time.time(), repeats)
    if text is not None:
        _print(printable(text, len(text)))  # one line, whatever the names in it hold


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
