"""``edgefl broker``: an MQTT broker for one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_EXAMPLES = """
Run an MQTT broker in the foreground.

Examples:

  edgefl broker --port 1883

  edgefl broker --kind mosquitto --port 1883
"""


def register(app: typer.Typer) -> None:
    app.command("broker", help=_EXAMPLES)(broker)


def broker(
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on")] = 1883,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    kind: Annotated[str, typer.Option(help="amqtt (embedded) or mosquitto (if it is installed)")] = "amqtt",
    folder: Annotated[Path | None, typer.Option(help="folder for mosquitto's configuration")] = None,
) -> None:
    import os
    import tempfile

    from edgefl import mosquitto_command, serve_broker
    from edgefl.wire.errors import ConfigError

    if kind == "amqtt":
        serve_broker(host, port)
    elif kind == "mosquitto":
        command = mosquitto_command(port, folder or Path(tempfile.mkdtemp(prefix="edgefl-mosquitto-")), host)
        os.execvp(command[0], command)
    else:
        raise ConfigError(f"--kind {kind!r} is unknown: write amqtt or mosquitto")
