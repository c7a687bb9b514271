"""Files with profile reports, which compare the measurements of several machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgefl.errors import ConfigError, ProtocolError
from edgefl.system.files import write_text
from edgefl.wire.bundle import profiles
from edgefl_server.profiling.rows import DeviceReport, FleetReport

VERSION = 1
_LETTERS = 64
_MOST_BYTES = 64 << 20


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a file, as JSON."""

    v: int = VERSION
    devices: tuple[DeviceReport, ...]


def record(path: Path, devices: Sequence[DeviceReport]) -> None:
    """Write those that have a profile, and why the others have none. ConfigError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, msgspec.json.encode(Recorded(devices=tuple(devices))).decode())
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; name another file", path=str(path)
        ) from error


def read_recorded(path: Path) -> tuple[DeviceReport, ...]:
    """The devices in a file that :func:`record` wrote. ConfigError if it is none."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than any recorded profile", path=str(path))
        found = msgspec.json.decode(path.read_bytes(), type=Recorded)
        if found.v != VERSION:
            raise ConfigError(
                f"{path} is of version {found.v}, this edgefl reads {VERSION}: record it again, or install a matching "
                "edgefl",
                path=str(path),
            )
        return tuple(_checked(device) for device in found.devices)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}; name a file that `edgefl profile --record` wrote",
            path=str(path),
        ) from error
    except (msgspec.DecodeError, OverflowError, ProtocolError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} holds no recorded profiles: {error}; name a file that `edgefl profile --record` wrote",
            path=str(path),
        ) from error


def merged(report: FleetReport, others: Sequence[DeviceReport]) -> FleetReport:
    """``report`` with ``others`` behind its own devices."""
    return msgspec.structs.replace(report, devices=(*report.devices, *others))


def _checked(device: DeviceReport) -> DeviceReport:
    """A device's report as it may be shown: within the bounds of a profile that comes over the wire."""
    texts = (device.device, device.tier, device.agent, device.reason)
    if not all(text.isprintable() and len(text) <= _LETTERS for text in texts):
        raise ProtocolError(f"the names of device {device.device[:_LETTERS]!r} cannot be shown")
    if device.profile is None:
        return device
    return msgspec.structs.replace(device, profile=profiles.decode(profiles.encode(device.profile)))
