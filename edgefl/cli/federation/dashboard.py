"""``edgefl dashboard``: the page of a run and its fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.options import Database
from edgefl.cli.output import errors, print_json
from edgefl.errors import ConfigError


def dashboard(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="folder of a run, or of a server (its --out)")
    ] = None,
    server: Annotated[str, typer.Option(help="address of a page to follow, instead of a folder")] = "",
    listen: Annotated[
        str, typer.Option(help="HOST:PORT or PORT; port 0: any that is free")
    ] = "127.0.0.1:8090",
    database: Database = "",
    operator_token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="EDGEFL_OPERATOR_TOKEN_FILE",
            help="file whose first line lets operators give orders; or EDGEFL_OPERATOR_TOKEN",
        ),
    ] = None,
    otlp: Annotated[
        str, typer.Option(help="URL of an OpenTelemetry collector that gets a trace of each round")
    ] = "",
    grafana: Annotated[bool, typer.Option("--grafana", help="print the Grafana dashboard (JSON)")] = False,
    alerts: Annotated[bool, typer.Option("--alerts", help="print Prometheus's alert rules (YAML)")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="say where it listens as JSON")] = False,
) -> None:
    """Show a run and its fleet in a browser.

    The page has rounds, devices, times, bytes, memory, and what the server says.

    It reads what the server keeps in its folder, in a process of its own: killing it changes nothing in the run. Whoever
    reaches the page may read it. With an operator's token it takes orders: pause, resume, drain, roll back.

    Examples:

      edgefl dashboard runs/fleet

      edgefl dashboard runs/fleet --listen 0.0.0.0:8090 --operator-token-file token.txt

      edgefl dashboard --server http://gateway:8090      (follows the page of another machine)

      edgefl dashboard --grafana > fleet.json
    """

    if grafana or alerts:
        from edgefl_server.dashboard import ALERTS, GRAFANA

        typer.echo((GRAFANA if grafana else ALERTS).read_text(encoding="utf-8"), nl=False)
        return
    if (run is None) == (not server):
        raise ConfigError("name the folder of a run, or the page to follow by --server URL, and not both")
    from edgefl_server.dashboard.web.serve import (
        bind,
        hub_of,
        is_loopback,
        order_handler,
        parse_listen,
        serve,
        url_of,
    )

    host, port = parse_listen(listen)
    hub = hub_of(run, server, database=database, otlp=otlp)
    handler = order_handler(run, server, operator_token_file)
    bound = bind(host, port)
    url = url_of(bound)
    if as_json:
        print_json({"event": "listening", "url": url, "orders": handler.open})
    else:
        orders = "takes orders with the token" if handler.open else "read-only"
        errors.print(f"the fleet's page: {url} ({orders})")
    if not is_loopback(host):
        errors.print(
            f"warning: {host} can be reached from other machines, and the page shows the fleet to anybody who does, without "
            "a token: put a proxy that asks for a password before it, or listen at 127.0.0.1"
        )
    serve(hub, handler, bound, host)
