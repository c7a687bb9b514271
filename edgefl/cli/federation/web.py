"""Pages that run beside a run or a server: the dashboard, and the page for browsers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli.output import errors
from edgefl.system.processes import PARENT, end_process, module_command

if TYPE_CHECKING:
    from edgefl.config import Federation
    from edgefl.web.page import WebSettings
    from edgefl.wire.mqtt.address import Address
import re

FLAG = "--web"
PAGES = "Pages for browsers"
DEFAULT = "0.0.0.0:8091"
_END_S = 5.0
_LOOK_S = 0.05

Web = Annotated[
    str,
    typer.Option(
        FLAG,
        rich_help_panel=PAGES,
        metavar="[HOST:PORT]",
        help=f"let phones and browsers join by a page, whose QR code is shown (docs/agents/web.md); by default at {DEFAULT}",
    ),
]
WebCertFile = Annotated[
    str,
    typer.Option(
        rich_help_panel=PAGES,
        help="certificate of the page (PEM), for https: phones give threads and a lit screen to such pages only",
    ),
]
WebKeyFile = Annotated[str, typer.Option(rich_help_panel=PAGES, help="its key (PEM, without a password)")]
WebBroker = Annotated[
    str,
    typer.Option(
        rich_help_panel=PAGES,
        help="WebSocket URL of the broker that browsers use, like wss://broker.lan:8884/mqtt; default: through the page",
    ),
]


@dataclass(frozen=True)
class WebOptions:
    """Options of the page for browsers.

    Attributes:
        listen: listening address of the page, HOST:PORT; "" for no page.
        cert_file: certificate (PEM) for https; "" for http.
        key_file: its private key (PEM).
        broker: WebSocket URL of the broker for browsers; "" to relay them.
    """

    listen: str = ""
    cert_file: str = ""
    key_file: str = ""
    broker: str = ""

    def check(self) -> None:
        """Check the options before anything is started. The address is tried by listening on it for a moment.

        Raises:
            ConfigError: if the page is not built, its address is in use, or certificate or broker's URL cannot be
                used. If ``listen`` is "", only other options that are set are an error.
        """
        from edgefl.errors import ConfigError

        if not self.listen:
            if self.cert_file or self.key_file or self.broker:
                raise ConfigError(
                    f"a certificate and a broker for the page go with {FLAG}: add it, or leave them out"
                )
            return
        from edgefl.web.page import browsers_broker, built_page, in_terminal
        from edgefl.web.serve import check_certificate
        from edgefl_server.dashboard.web.serve import bind, parse_listen

        built_page()
        in_terminal("http://127.0.0.1")
        check_certificate(self.cert_file, self.key_file)
        if self.broker:
            browsers_broker(self.broker, secure=bool(self.cert_file))
        bind(*parse_listen(self.listen)).close()


@contextmanager
def web_beside(
    options: WebOptions, folder: Path, federation: Federation, broker: Address, server_key: str, *, code: bool
) -> Iterator[None]:
    """Open a context in which a child process serves the page for browsers, and print its address.

    Without --web, nothing is started. The process's output is in ``logs/web.log`` of ``folder``.

    Args:
        options: options of the page.
        folder: folder of the run.
        federation: the federation.
        broker: address of the broker.
        server_key: public key of the server.
        code: True to print a QR code of the address too.
    """
    if not options.listen:
        yield
        return
    import msgspec

    from edgefl.config.text import dump
    from edgefl.lab.run_folder import without_password
    from edgefl.system.files import write_text
    from edgefl.web import page as web

    own = folder / web.FOLDER
    secret = web.secret_of(own)
    write_text(own / "federation.toml", dump(without_password(federation)))
    settings = _settings(options, own, secret, broker, server_key)
    log = folder / "logs" / "web.log"
    with page_process(["edgefl.web"], log, "the page for phones", msgspec.json.encode(settings)):
        _tell(settings.address, secure=bool(options.cert_file), code=code)
        yield


@contextmanager
def page_process(
    arguments: Sequence[str], log_file: Path, title: str, settings: bytes, **environment: str
) -> Iterator[None]:
    """Open a context in which ``python -m ARGUMENTS`` runs, with ``settings`` on its standard input.

    If it fails before the ``with`` block ends, a warning with the path of its log is printed at the end, unless a
    signal ended it.

    Args:
        arguments: module and its arguments.
        log_file: file that gets its output.
        title: name of the page in the warning.
        settings: bytes for its standard input.
        **environment: additional environment variables.
    """
    log_file.parent.mkdir(exist_ok=True)
    command, own = module_command(*arguments), {PARENT: str(os.getpid()), **environment}
    with log_file.open("ab") as log:
        page = subprocess.Popen(
            command,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert page.stdin is not None
    with page.stdin as pipe:
        pipe.write(settings)
    try:
        yield
    finally:
        if (page.poll() or 0) > 0:
            errors.print(f"{title} ended early; {log_file} says why")
        end_process(page, _END_S)


def _settings(
    options: WebOptions, folder: Path, secret: str, broker: Address, server_key: str
) -> WebSettings:
    from dataclasses import replace

    from edgefl.web.page import WebSettings, address_of, browsers_broker
    from edgefl.web.relay import BrowserRelay
    from edgefl_server.dashboard.web.serve import bind, parse_listen

    host, port = parse_listen(options.listen)
    with bind(host, port) as tried:
        port = tried.getsockname()[1]
    secure = bool(options.cert_file)
    own = "" if not options.broker else browsers_broker(options.broker, secure=secure)
    if not own:
        BrowserRelay(broker)
    return WebSettings(
        folder=str(folder),
        host=host,
        port=port,
        secret=secret,
        address=address_of(host, port, secret, secure=secure),
        broker=own,
        relay="" if own else replace(broker, username="", password="").url,
        login=bool(broker.username),
        server_key=server_key,
        cert_file=options.cert_file,
        key_file=options.key_file,
    )


def _tell(address: str, *, secure: bool, code: bool) -> None:
    from edgefl.web.page import in_terminal

    if code:
        sys.stderr.write(in_terminal(address))
    errors.print(f"phones join at {address}")
    if not secure:
        errors.print(
            "over http, phones train on one thread and their screens may go dark: --web-cert-file and --web-key-file make "
            "it https"
        )
    sys.stderr.flush()


DASHBOARD_FLAG = "--dashboard"
DASHBOARD_DEFAULT = "127.0.0.1:8090"
_PLACE = re.compile(r"([^/\s]*:)?\d{1,5}")

Dashboard = Annotated[
    str,
    typer.Option(
        DASHBOARD_FLAG,
        rich_help_panel=PAGES,
        metavar="[HOST:PORT]",
        help=f"show the fleet in a browser meanwhile (`edgefl dashboard`); by default at {DASHBOARD_DEFAULT}",
    ),
]


_PLACES = {DASHBOARD_FLAG: DASHBOARD_DEFAULT, FLAG: DEFAULT}


def with_place(arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with a default address inserted after ``--dashboard`` and ``--web`` that lack one."""
    found: list[str] = []
    for at, word in enumerate(arguments):
        found.append(word)
        following = arguments[at + 1] if at + 1 < len(arguments) else ""
        if word in _PLACES and not _PLACE.fullmatch(following):
            found.append(_PLACES[word])
    return found


@contextmanager
def page_beside(listen: str, folder: Path, database: str = "") -> Iterator[None]:
    """Open a context in which a child process serves the dashboard of ``folder`` at ``listen``.

    If ``listen`` is "", nothing is started. The process's output is in ``logs/dashboard.log`` of ``folder``.

    Args:
        listen: listening address, HOST:PORT.
        folder: folder of the run.
        database: URL of the run's database; "" if it is in the folder.

    Raises:
        ConfigError: if the address cannot be listened on. Raised before anything is started.
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
