"""``edgefl key``: the key file of a server or of a device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.output import console, print_json

_HELP = """
Show or replace the key of a server or of a device.

A server's key is the file that `edgefl server --sign-key` names, a device's is device.key in its store's folder.
A key that is replaced introduces the new one: who knows the old one learns the new one from it, and takes the old one for
--overlap more. Replace it while the server, or the device, is stopped.

Examples:

  edgefl key show server.key

  edgefl key rotate server.key --overlap 30

  edgefl key rotate ~/.edgefl/demo/phone-7/device.key --json
"""


def register(app: typer.Typer) -> None:
    group = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="rich")
    group.command("show")(show)
    group.command("rotate")(rotate)
    app.add_typer(group, name="key")


def show(
    file: Annotated[Path, typer.Argument(help="the key file")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Print the public key of a file; the file is made if there is none."""
    from edgefl.wire.keys import KeyPair

    _tell(file, KeyPair(file).public_key, as_json=as_json)


def rotate(
    file: Annotated[Path, typer.Argument(help="the key file")],
    overlap: Annotated[
        float, typer.Option(min=0, help="days for which the old key is good beside the new one")
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Replace the key in a file by a new one, which the old one introduces."""
    from edgefl.wire.keys import rotate as follow

    fresh = follow(file, overlap_s=overlap * 86_400, now=time.time())
    _tell(file, fresh.public_key, as_json=as_json)


def _tell(file: Path, public_key: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"file": str(file), "public_key": public_key})
    else:
        console.print(public_key, soft_wrap=True)
