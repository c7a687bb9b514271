"""``edgefl acl``: access lists for brokers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Target = StrEnum("Target", ["mosquitto", "emqx", "aws", "hivemq"])


def acl(
    broker: Annotated[Target, typer.Option(help="whose access list")] = Target.mosquitto,
    federation: Annotated[str, typer.Option(help="name of the federation")] = "demo",
    server: Annotated[str, typer.Option(help="user of the server")] = "server",
    asker: Annotated[str, typer.Option(help="user of whoever asks for profiles")] = "asker",
    aws: Annotated[str, typer.Option(help="REGION:ACCOUNT, for aws")] = "REGION:ACCOUNT",
    out: Annotated[Path | None, typer.Option(help="folder for the files; default: print them")] = None,
) -> None:
    """Write who may read and write which topic, as a broker reads it: the server, askers (`edgefl profile --fleet`), and
    each device, whose user, or whose certificate's common name, is its name.

    Examples:

      edgefl acl --broker mosquitto --federation orchard > mosquitto.acl

      edgefl acl --broker aws --federation orchard --aws eu-west-1:123456789012 --out policies
    """

    from edgefl.system.files import write_text
    from server.access.files import BROKERS, written
    from server.access.rules import Access

    name = next(each for each in BROKERS if each == broker.value)
    for file, text in written(Access(federation, server, asker), name, aws=aws).items():
        if out is None:
            typer.echo(text, nl=False)
        else:
            out.mkdir(parents=True, exist_ok=True)
            write_text(out / file, text)
            typer.echo(str(out / file))
