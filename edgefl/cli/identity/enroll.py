"""``edgefl enroll``: the list of the devices that a server lets in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.options import add_group, writable_file
from edgefl.cli.output import console, print_json, print_table
from edgefl.errors import ConfigError
from edgefl.wire.mqtt.topics import checked_name

if TYPE_CHECKING:
    from edgefl_server.identity.registry import DeviceKey, Registry

_HELP = """
Keep the list of the devices that a server lets in.

A device comes onto it by a one-time token, which is given to it as `edgefl device --token @FILE`, or by a request for a
certificate that it wrote. The list may be changed while the server runs. A server without a list trusts the first key of
each name, and keeps those in devices.sqlite in its folder: these commands show and change that file, too.

Examples:

  edgefl enroll token phone-7 --list devices.sqlite --federation demo --sign-key server.key

  edgefl enroll request phone-7 --federation demo --out phone-7.csr       (on the device)

  edgefl enroll add phone-7.csr --list devices.sqlite

  edgefl enroll ls --list devices.sqlite --federation demo --json

  edgefl enroll revoke phone-7 --list devices.sqlite --federation demo
"""

_KEY_HELP = """
Make, show or replace the key of a server or of a device.

A server's key is the file that `edgefl server --sign-key` names, a device's is device.key in its store's folder.
A key that is replaced introduces the new one: who knows the old one learns the new one from it, and takes the old one for
--overlap more. Replace it while the server, or the device, is stopped.

Examples:

  edgefl key new server.key

  edgefl key show server.key

  edgefl key rotate server.key --overlap 30

  edgefl key rotate ~/.edgefl/demo/phone-7/device.key --json
"""

List = Annotated[Path, typer.Option("--list", help="the list: one file, made if there is none")]
Federation = Annotated[str, typer.Option(help="name of the federation")]
Json = Annotated[bool, typer.Option("--json", help="JSON")]
JsonObject = Annotated[bool, typer.Option("--json", help="one JSON object")]
KeyFile = Annotated[Path, typer.Argument(help="the key file")]
Device = Annotated[str, typer.Argument(help="name of the device")]


def register(app: typer.Typer) -> None:
    add_group(app, "enroll", _HELP, token, request, add, ls, revoke, forget)
    add_group(app, "key", _KEY_HELP, new, show, rotate)


def token(
    device: Device,
    list_file: List,
    federation: Federation = "demo",
    sign_key: Annotated[
        Path | None, typer.Option(help="the server's key file, as of `edgefl server`; default: this user's")
    ] = None,
    hours: Annotated[float, typer.Option(min=0, help="how long it can be used")] = 24.0,
    as_json: Json = False,
) -> None:
    """Print a one-time token with which one device can enrol.

    It contains the server's public key, which the device trusts from then on."""
    from edgefl.wire import folders
    from edgefl.wire.enrolment import new_token
    from edgefl.wire.keys import KeyPair

    path = sign_key or folders.server_key(checked_name("federation", federation))
    until = time.time() + hours * 3600
    made = new_token(KeyPair(path).public)
    with _open(list_file, federation) as registry:
        registry.issue(made, checked_name("device", device), valid_until=until)
    if as_json:
        print_json({"device": device, "federation": federation, "token": made.text, "until": until})
    else:
        console.print(made.text)


def request(
    device: Device,
    out: Annotated[Path, typer.Option(callback=writable_file, help="file for the request")],
    federation: Federation = "demo",
    store: Annotated[
        Path | None, typer.Option(help="folder of the device's store; default: ~/.edgefl/FEDERATION/ID")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a certificate-signing request, on a device.

    It has the device's public key, which is made if there is none."""
    from edgefl.system.files import write_whole
    from edgefl.wire import folders
    from edgefl.wire.enrolment import signing_request
    from edgefl.wire.keys import KeyPair
    from edgefl_device.link.identity import KEY_FILE

    checked_name("federation", federation), checked_name("device", device)
    keys = KeyPair((store or folders.store(federation, device)) / KEY_FILE)
    write_whole(out, signing_request(keys, federation, device))
    _say({"device": device, "federation": federation, "key": keys.public_key, "file": str(out)}, as_json)


def add(
    file: Annotated[Path, typer.Argument(help="a request of `edgefl enroll request`, or of OpenSSL")],
    list_file: List,
    as_json: Json = False,
) -> None:
    """Enrol the device of a signing request.

    Make sure first that the request comes from the device."""
    from edgefl.wire.enrolment import read_signing_request

    found = read_signing_request(file.read_bytes(), str(file))
    with _open(list_file, found.federation) as registry:
        registry.add(found.device, found.key, source="request", now=time.time())
    _say({"device": found.device, "federation": found.federation, "key": found.key.hex()}, as_json)


def ls(list_file: List, federation: Federation = "demo", as_json: Json = False) -> None:
    """List the enrolled devices, with every key that they had. A missing list is an error."""
    if not list_file.is_file():
        raise ConfigError(
            f"there is no list {list_file}: name the one of `edgefl server`", path=str(list_file)
        )
    with _open(list_file, federation) as registry:
        rows = [_row(each) for each in registry.all()]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(f"devices of {federation}", [{**row, "added": _date(row["added"])} for row in rows])
    else:
        console.print(f"no device of {federation} is on the list {list_file}")


def revoke(device: Device, list_file: List, federation: Federation = "demo", as_json: Json = False) -> None:
    """Refuse a device, whatever key it shows, until it is enrolled again."""
    with _open(list_file, federation) as registry:
        count = registry.revoke(device)
    _some(device, count)
    _say({"device": device, "federation": federation, "revoked": count}, as_json)


def forget(device: Device, list_file: List, federation: Federation = "demo", as_json: Json = False) -> None:
    """Remove a device from the list.

    The server then treats it as unknown. Use this for a device whose store was lost."""
    with _open(list_file, federation) as registry:
        count = registry.forget(device)
    _some(device, count)
    _say({"device": device, "federation": federation, "forgotten": count}, as_json)


@contextmanager
def _open(path: Path, federation: str) -> Iterator[Registry]:
    from edgefl_server.identity.registry import Registry

    registry = Registry(path, checked_name("federation", federation))
    try:
        yield registry
    finally:
        registry.close()


def _some(device: str, count: int) -> None:
    if not count:
        raise ConfigError(
            f"the list has no good key of device {device}: `edgefl enroll ls` shows it", device=device, keys=0
        )


def _row(each: DeviceKey) -> dict[str, Any]:
    return {
        "device": each.device,
        "state": each.state,
        "source": each.source,
        "key": each.key.hex(),
        "added": each.added_at,
    }


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _say(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(told)
    else:
        text = ", ".join(f"{name} {value}" for name, value in told.items())
        console.print(text)


def show(file: KeyFile, as_json: JsonObject = False) -> None:
    """Print the public key of a key file. A missing file is an error."""
    from edgefl.wire.keys import KeyPair

    if not file.exists():
        raise ConfigError(
            f"there is no key file {file}; name another one, or make it: `edgefl key new {file}`",
            path=str(file),
        )
    _tell_key(file, KeyPair(file).public_key, as_json=as_json)


def new(
    file: Annotated[Path, typer.Argument(help="the key file, which must not exist yet")],
    as_json: JsonObject = False,
) -> None:
    """Make a key in a new file, and print its public key. An existing file is an error."""
    from edgefl.wire.keys import KeyPair

    if file.exists():
        raise ConfigError(
            f"{file} exists: show its key (`edgefl key show`), or replace it (`edgefl key rotate`)",
            path=str(file),
        )
    _tell_key(file, KeyPair(file).public_key, as_json=as_json)


def rotate(
    file: KeyFile,
    overlap: Annotated[
        float, typer.Option(min=0, help="days for which the old key is good beside the new one")
    ] = 30.0,
    as_json: JsonObject = False,
) -> None:
    """Replace the key in a file by a new one, which the old key signs as its successor."""
    from edgefl.wire.keys import rotate as follow

    fresh = follow(file, overlap_s=overlap * 86_400, now=time.time())
    _tell_key(file, fresh.public_key, as_json=as_json)


def _tell_key(file: Path, public_key: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"file": str(file), "public_key": public_key})
    else:
        console.print(public_key)
