"""``edgefl broker``, ``edgefl acl`` and ``edgefl mirror``: services beside a federation."""

from __future__ import annotations

import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli import interrupts
from edgefl.cli.options import CaFile, CertFile, KeyFile, parse_bytes, parse_limits, writable_folder

if TYPE_CHECKING:
    from edgefl_server.lab_broker import LabBroker


from edgefl.cli.output import console, print_json
from edgefl.wire.mirrors import Mirror


def broker(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port to listen on; default: 1883, with --tls 8883")
    ] = 0,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    broker_kind: Annotated[
        str, typer.Option(help="amqtt (embedded) or mosquitto (if it is installed)")
    ] = "amqtt",
    folder: Annotated[
        Path | None, typer.Option(help="folder for mosquitto's configuration, certificates and passwords")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Mosquitto with TLS, users and an access list")] = False,
    federation: Annotated[str, typer.Option(help="with --tls: name of the federation")] = "demo",
    device: Annotated[
        list[str] | None, typer.Option(help="with --tls: name of a device that may come; may be repeated")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="with --tls: host name for the certificate; may be repeated")
    ] = None,
    websocket_port: Annotated[
        int, typer.Option(min=0, max=65535, help="MQTT over WebSocket on this port too, for browsers")
    ] = 0,
    client_certificates: Annotated[
        bool, typer.Option("--client-certificates", help="with --tls: certificates instead of passwords")
    ] = False,
    ca_file: CaFile = "",
    cert_file: CertFile = "",
    key_file: KeyFile = "",
    chunk_bytes: Annotated[
        int,
        typer.Option(
            min=256, help="Mosquitto: `chunk_bytes` in `limits` of the federation; bounds a message"
        ),
    ] = 128 * 1024,
    memory: Annotated[
        str,
        typer.Option(help="Mosquitto: memory for messages, like 2GiB; default: a quarter of the machine's"),
    ] = "",
) -> None:
    """Run an MQTT broker in the foreground.

    Without --tls it is for a trial on this machine: it asks for no password, and listens to this machine only.

    With --tls it is Mosquitto with TLS and the access list of `edgefl acl`. It has a user for the server, for clients that
    request profiles (`edgefl profile --fleet`) and for each --device. Certificates and passwords are made in --folder if
    none are given, and are used again.

    Examples:

      edgefl broker --port 1883

      edgefl broker --broker-kind mosquitto --port 1883

      edgefl broker --port 1883 --websocket-port 8083

    With TLS:

      edgefl broker --tls --host 0.0.0.0 --name broker.lan --federation orchard --device pi-1 --device pi-2 --folder broker

      edgefl broker --tls --client-certificates --websocket-port 8884 --device pi-1 --folder broker
    """

    import tempfile

    from edgefl.errors import ConfigError
    from edgefl_server.broker import mosquitto_command, run_mosquitto
    from edgefl_server.embedded_broker import run_amqtt

    limits = parse_limits([f"chunk_bytes={chunk_bytes}"])
    memory_bytes = parse_bytes(memory, "--memory") if memory else 0
    host = host.removeprefix("[").removesuffix("]")
    if broker_kind not in ("amqtt", "mosquitto"):
        raise ConfigError(f"--broker-kind {broker_kind!r} is unknown: write amqtt or mosquitto")
    if tls:
        from edgefl_server.lab_broker import LabBroker

        lab = LabBroker(
            folder=(folder or Path("broker")).resolve(),
            federation=federation,
            devices=tuple(device or ()),
            host=host,
            port=port or 8883,
            websocket_port=websocket_port,
            names=tuple(name or ()),
            ca_file=_whole(ca_file),
            cert_file=_whole(cert_file),
            key_file=_whole(key_file),
            client_certificates=client_certificates,
            limits=limits,
            memory_bytes=memory_bytes,
        )
        command = lab.command()
        _tell(lab)
        raise typer.Exit(run_mosquitto(command, memory_bytes))
    if device or name or client_certificates or ca_file or cert_file or key_file:
        raise ConfigError("users, names and certificates go with TLS: add --tls, or leave them out")
    port = port or 1883
    if broker_kind == "amqtt":
        _say(host, port, websocket_port)
        if (
            signal.getsignal(signal.SIGINT) is interrupts.handler
        ):  # asyncio replaces Python's own handler only
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run_amqtt(host, port, websocket_port)
    else:
        own = folder or Path(tempfile.mkdtemp(prefix="edgefl-mosquitto-"))
        command = mosquitto_command(port, own, host, websocket_port, limits, memory_bytes)
        _say(host, port, websocket_port)
        raise typer.Exit(run_mosquitto(command, memory_bytes))


def _whole(path: str) -> str:
    return str(Path(path).resolve()) if path else ""


def _say(host: str, port: int, websocket_port: int) -> None:
    """Print the address of a broker without passwords. Only this machine can connect to it."""
    from edgefl.wire.mqtt.address import Address

    also = f" and ws://{Address(host, websocket_port)}" if websocket_port else ""
    print(
        f"starting an MQTT broker on {Address(host, port)}{also}, for this machine alone and without passwords",
        flush=True,
    )


def _tell(lab: LabBroker) -> None:
    """Print the options with which each user of a broker with TLS connects."""
    from shlex import quote

    from edgefl.wire.mqtt.address import Address

    print(
        f"starting Mosquitto on {Address(lab.host, lab.port)} with TLS, for federation {lab.federation!r}",
        flush=True,
    )
    for user in lab.users:
        options = " ".join(f"--{key} {quote(value)}" for key, value in lab.needs(user).items())
        print(f"  {user}: {options}", flush=True)
    if lab.websocket_port:
        print(f"  over WebSocket: the same with wss:// and port {lab.websocket_port}", flush=True)


Target = StrEnum("Target", ["mosquitto", "emqx", "aws", "hivemq"])


def acl(
    broker_kind: Annotated[Target, typer.Option(help="broker that reads the list")] = Target.mosquitto,
    federation: Annotated[str, typer.Option(help="name of the federation")] = "demo",
    server_user: Annotated[str, typer.Option(help="user of the server")] = "server",
    asker_user: Annotated[str, typer.Option(help="user of whoever asks for profiles")] = "asker",
    aws: Annotated[str, typer.Option(help="REGION:ACCOUNT, for aws")] = "REGION:ACCOUNT",
    out: Annotated[
        Path | None, typer.Option(callback=writable_folder, help="folder for the files; default: print them")
    ] = None,
) -> None:
    """Write an access list for a broker.

    It says who may read and write which topic: the server, askers (`edgefl profile --fleet`), and each device, whose
    user, or whose certificate's common name, is its name.

    Examples:

      edgefl acl --broker-kind mosquitto --federation orchard > mosquitto.acl

      edgefl acl --broker-kind aws --federation orchard --aws eu-west-1:123456789012 --out policies
    """

    from edgefl.system.files import write_text
    from edgefl_server.access.files import BROKERS, build_access_files
    from edgefl_server.access.rules import AccessRules

    name = next(each for each in BROKERS if each == broker_kind.value)
    for file, text in build_access_files(
        AccessRules(federation, server_user, asker_user), name, aws=aws
    ).items():
        if out is None:
            typer.echo(text, nl=False)
        else:
            out.mkdir(parents=True, exist_ok=True)
            write_text(out / file, text)
            typer.echo(str(out / file))


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

    from edgefl.mirror.blobs import CacheSettings
    from edgefl.mirror.serve import MirrorAddress, MirrorServer

    cached = (
        CacheSettings(Mirror.parse(upstream), parse_bytes(most, "--most"), upstream_ca_file)
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
    """Log that prints each text, or with ``as_json`` a JSON object with the text and ``event``, the name of the event."""

    def __init__(self, event: str, as_json: bool) -> None:
        self._event, self._as_json = event, as_json

    def append(self, text: str) -> None:
        if self._as_json:
            print_json({"event": self._event, "text": text})
        else:
            console.print(text)
