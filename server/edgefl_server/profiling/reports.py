"""Reports on the devices of a profiled fleet, and files that store them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from edgefl.errors import ConfigError, ProtocolError
from edgefl.system.files import write_text
from edgefl.wire.bundle import profiles
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.profiles import BundleProfile
from edgefl.wire.mqtt.messages import Hello
from edgefl_server.coordinator.roster import TierRule, tier_of

State = Literal["waiting", "measuring", "done", "declined", "silent", "late", "offline", "skipped", "unknown"]
FINAL = ("done", "declined", "skipped")
"""States of a device that do not change any more."""

_UNKNOWN_NEED = 1 << 62


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report on one device: its properties, the state of the request, and its profile, or the reason why it has none."""

    device: str
    tier: str = ""
    state: State = "waiting"
    reason: str = ""
    text: str = ""
    agent: str = ""
    engines: dict[str, str] = msgspec.field(default_factory=dict)
    memory_bytes: int = 0
    cores: int = 0
    profile: BundleProfile | None = None


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Reports on all devices of a profiled federation, sorted by name. ``seconds`` is the duration of the profiling."""

    federation: str
    seconds: float
    devices: tuple[DeviceReport, ...]

    @property
    def answered(self) -> tuple[DeviceReport, ...]:
        """Return the devices with a profile."""
        return tuple(row for row in self.devices if row.profile is not None)

    @property
    def silent(self) -> tuple[DeviceReport, ...]:
        """Return the devices without a profile, whatever the reason."""
        return tuple(row for row in self.devices if row.profile is None)


@dataclass
class DeviceProfileState:
    """State of one device while it is profiled. Times are on the profiler's clock."""

    report: DeviceReport
    has_hello: bool = False
    online: bool = False
    online_since: float | None = None
    offline_since: float | None = None
    asked_first: float | None = None
    asked_last: float = 0.0
    has_answered: bool = False

    def update(self, **changes: object) -> None:
        """Replace the fields ``changes`` of the device's report."""
        self.report = msgspec.structs.replace(self.report, **changes)

    @property
    def final(self) -> bool:
        """True if the state of the device does not change any more."""
        return self.report.state in FINAL


Offered = Mapping[str, Mapping[str, BundleArchive]]
"""Bundles by tier and format."""


def by_tier(bundles: Iterable[BundleArchive]) -> Offered:
    """Return ``bundles`` as a mapping by tier, then by format. Equal bundles count once.

    Raises:
        ConfigError: If there is no bundle, or different bundles have the same tier and format.
    """
    bundles_by_tier: dict[str, dict[str, BundleArchive]] = {}
    for bundle in bundles:
        tier, kind = bundle.manifest.tier, bundle.manifest.format
        formats = bundles_by_tier.setdefault(tier, {})
        if kind in formats and formats[kind] != bundle:
            raise ConfigError(
                f"several bundles are for tier {tier!r} in format {kind}: name one of them",
                tier=tier,
                format=kind,
            )
        formats[kind] = bundle
    if not bundles_by_tier:
        raise ConfigError("there is no bundle to profile: name one, of a tier that there is")
    return bundles_by_tier


def tier_for(offered: Offered, device: str, hello: Hello) -> str:
    """Return the tier whose bundle a device should measure; empty if it cannot be determined.

    A single offered tier is returned at once. Otherwise the device measures the tier that its hello requests, and none
    if this tier is not offered. Without a request the device's name decides (``weak-3``), then its memory, if all
    bundles have a memory plan.
    """
    if len(offered) == 1:
        return next(iter(offered))
    if hello.tier:
        return hello.tier if hello.tier in offered else ""
    needs = {
        tier: max(bundle.manifest.planned_bytes for bundle in bundles.values())
        for tier, bundles in offered.items()
    }
    known = all(needs.values())
    rules = [TierRule(tier, (f"{tier}-*",), need if known else _UNKNOWN_NEED) for tier, need in needs.items()]
    return tier_of(rules, device, hello.memory_bytes)


VERSION = 1
_LETTERS = 64
_MOST_BYTES = 64 << 20


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a JSON file with reports on devices. ``v`` is the version of the format."""

    v: int = VERSION
    devices: tuple[DeviceReport, ...]


def record(path: Path, devices: Sequence[DeviceReport]) -> None:
    """Write the reports of ``devices`` to the JSON file ``path``; its folder is created if missing.

    Devices without a profile are written with their reasons.

    Raises:
        ConfigError: If the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, msgspec.json.encode(ProfileFile(devices=tuple(devices))).decode())
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; name another file", path=str(path)
        ) from error


def read_recorded(path: Path) -> tuple[DeviceReport, ...]:
    """Return the reports in a file that :func:`record` wrote.

    Raises:
        ConfigError: If the file cannot be read, or is not such a file.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than any recorded profile", path=str(path))
        found = msgspec.json.decode(path.read_bytes(), type=ProfileFile)
        if found.v != VERSION:
            raise ConfigError(
                f"{path} is of version {found.v}, this edgefl reads {VERSION}: record it again, or install a matching "
                "edgefl",
                path=str(path),
            )
        return tuple(_check_device(device) for device in found.devices)
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


def merge_reports(report: FleetReport, others: Sequence[DeviceReport]) -> FleetReport:
    """Return a copy of ``report`` with ``others`` appended to its devices. The order is not changed."""
    return msgspec.structs.replace(report, devices=(*report.devices, *others))


def _check_device(device: DeviceReport) -> DeviceReport:
    """Return ``device``, read from a file, with its profile checked like one that was received over the network.

    Raises:
        ProtocolError: If a name cannot be printed or is too long, or the profile is malformed.
    """
    texts = (device.device, device.tier, device.agent, device.reason)
    if not all(text.isprintable() and len(text) <= _LETTERS for text in texts):
        raise ProtocolError(f"the names of device {device.device[:_LETTERS]!r} cannot be shown")
    if device.profile is None:
        return device
    return msgspec.structs.replace(device, profile=profiles.decode(profiles.encode(device.profile)))
