"""``edgefl mirror``: weights over HTTP beside the broker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.options import parse_bytes
from edgefl.cli.output import console, print_json
from edgefl.wire.mirrors import Mirror


def mirror(
    folder: Annotated[Path, typer.Argument(help="folder of blobs; with --upstream that of the cache")],
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0: all")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port; 0: any that is free")] = 8480,
    cert_file: Annotated[str, typer.Option(help="certificate (PEM); switches HTTPS on")] = "",
    key_file: Annotated[str, typer.Option(help="its key (PEM, without a password)")] = "",
    upstream: Annotated[str, typer.Option(help="URL of a mirror whose blobs are cached in the folder")] = "",
    upstream_ca_file: Annotated[
        str, typer.Option(help="certificate of its authority (PEM), beside the system's")
    ] = "",
    most: Annotated[str, typer.Option(help="size of the cache; the longest unused leave first")] = "10GiB",
    as_json: Annotated[bool, typer.Option("--json", help="events as JSON lines")] = False,
) -> None:
    """Serve weights over HTTP beside the broker.

    It serves the folder that a server writes, or is a gateway's cache of another mirror.

    Devices check all that comes from a mirror, and turn to the broker where it fails. See docs/fleets/mirrors.md.

    Examples:

      edgefl mirror runs/fleet/mirror --host 0.0.0.0 --cert-file mirror.crt --key-file mirror.key

      edgefl mirror /var/cache/edgefl --upstream https://weights.example.org --most 20GiB --host 0.0.0.0
    """

    from edgefl.mirror.blobs import CachedMirror
    from edgefl.mirror.serve import MirrorAddress, MirrorServer

    cached = (
        CachedMirror(Mirror.parse(upstream), parse_bytes(most, "--most"), upstream_ca_file)
        if upstream
        else None
    )
    server = MirrorServer(
        folder,
        MirrorAddress(host, port, cert_file, key_file),
        upstream=cached,
        log=_EventPrinter("failed", as_json),
    )
    cache = f", a cache of {upstream}" if upstream else ""
    _EventPrinter("serving", as_json).append(f"serving {folder} at {server.url}{cache}")
    server.run()


class _EventPrinter:
    """Log that prints each text as an event of one kind."""

    def __init__(self, event: str, as_json: bool) -> None:
        self._event, self._as_json = event, as_json

    def append(self, text: str) -> None:
        if self._as_json:
            print_json({"event": self._event, "text": text})
        else:
            console.print(text)
