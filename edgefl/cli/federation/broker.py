"""``edgefl broker``: an MQTT broker for one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_EXAMPLES = """
Run an MQTT broker in the foreground, for a trial: it asks nobody for a password.

Examples:

  edgefl broker --port 1883

  edgefl broker --host 0.0.0.0 --port 1883

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

    if kind not in ("amqtt", "mosquitto"):
        raise ConfigError(f"--kind {kind!r} is unknown: write amqtt or mosquitto")
    if kind == "amqtt":
        _say(host, port)
        serve_broker(host, port)
    else:
        command = mosquitto_command(port, folder or Path(tempfile.mkdtemp(prefix="edgefl-mosquitto-")), host)
        _say(host, port)
        os.execvp(command[0], command)


def _say(host: str, port: int) -> None:
    """Where it will listen, and who may come."""
    alone = host in ("127.0.0.1", "::1", "localhost")
    who = (
        "for this machine alone; --host 0.0.0.0 lets others in"
        if alone
        else "for everybody who reaches it, without passwords"
    )
    print(f"starting an MQTT broker on {host}:{port}, {who}", flush=True)
