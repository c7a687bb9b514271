"""Options by which a command reaches the broker: the same names and the same meaning for each of them."""

from __future__ import annotations

from typing import Annotated

import typer

from edgefl.wire.errors import ConfigError
from edgefl.wire.mqtt.address import Address


def _without_password(context: typer.Context, option: typer.CallbackParam, text: str) -> str:
    """Everybody on a machine can read the arguments of its processes."""
    source = context.get_parameter_source(option.name or "")
    if text and source is not None and source.name == "COMMANDLINE" and Address.parse(text).password:
        raise ConfigError(
            "--broker holds a password, and everybody on this machine can read the arguments of a process: put the address "
            "into EDGEFL_BROKER, the password into EDGEFL_BROKER_PASSWORD, or name a file by --password-file"
        )
    return text


def without_secret(context: typer.Context, option: typer.CallbackParam, text: str) -> str:
    """A callback for secrets that may stand in a file, as @FILE, or in the environment."""
    source = context.get_parameter_source(option.name or "")
    if text and source is not None and source.name == "COMMANDLINE" and not text.startswith("@"):
        raise ConfigError(
            f"--{option.name} is a secret, and everybody on this machine can read the arguments of a process: put it into "
            f"a file and name that as @FILE, or into {option.envvar}"
        )
    return text


Broker = Annotated[
    str,
    typer.Option(
        envvar="EDGEFL_BROKER",
        callback=_without_password,
        help="host:port of the MQTT broker, or a URL: mqtts://user@host:8883, wss://host/mqtt",
    ),
]
CaFile = Annotated[str, typer.Option(help="certificate of the broker's authority (PEM); switches TLS on")]
CertFile = Annotated[str, typer.Option(help="client certificate (PEM), for mutual TLS")]
KeyFile = Annotated[str, typer.Option(help="its key (PEM, without a password)")]
PasswordFile = Annotated[
    str, typer.Option(help="file whose first line is the password; or EDGEFL_BROKER_PASSWORD")
]
InsecurePassword = Annotated[
    bool, typer.Option("--insecure-password", help="let the password travel without TLS")
]
