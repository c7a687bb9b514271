"""Schedules of faults as data, and the files that hold them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from edgefl.config.text import parse_toml
from edgefl.errors import ConfigError

LinkFault = Literal["delay", "reorder", "bandwidth", "duplicate", "reset", "half_open", "stall"]
ProcessFault = Literal["kill", "stop", "disk_full", "clock"]
KINDS: tuple[str, ...] = (*get_args(LinkFault), *get_args(ProcessFault))

EVERYBODY = "*"
BROKER, SERVER = "broker", "server"

_MOST_S = 3600.0
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=_MOST_S)]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault: it begins ``after_s`` seconds after the opening of round ``round``, and lasts ``seconds``.

    ``target`` is ``server``, ``broker``, a device, or ``*`` for every link, every device and the server. The meaning
    of ``amount`` depends on the kind.

    * delay: wait of each packet in seconds, in order.
    * reorder: largest random wait in seconds; links overtake each other.
    * bandwidth: bytes per second.
    * duplicate: share of PUBLISH packets that arrive twice.
    * disk_full: largest size of a file in bytes.
    * clock: permanent jump of a process's wall clock in seconds.

    ``reset`` cuts the connections of a link with the bytes in flight. After ``half_open`` the broker still holds its
    end. ``stall`` blocks all packets. ``kill`` is SIGKILL, followed by a restart; ``stop`` is SIGSTOP, and SIGCONT
    after ``seconds``. A broker can only be killed and stopped.
    """

    kind: LinkFault | ProcessFault
    target: str = EVERYBODY
    round: Annotated[int, msgspec.Meta(ge=1)] = 1
    after_s: _Seconds = 0.0
    seconds: _Seconds = 1.0
    amount: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)] = 0.0

    def __str__(self) -> str:
        amount = f" {self.amount:g}" if self.amount else ""
        return f"{self.kind}{amount} {self.target} in round {self.round} +{self.after_s:g}s for {self.seconds:g}s"


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The faults of one run. ``seed`` determines their random effects, such as the packets that are duplicated."""

    seed: int = 0
    faults: tuple[Fault, ...] = ()


def load_schedule(path: Path) -> Schedule:
    """Load a schedule from a TOML or JSON file.

    Raises:
        ConfigError: if the file cannot be read or is not a schedule; the text has the reason.
    """
    try:
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        if path.suffix == ".json":
            return msgspec.json.decode(data, type=Schedule)
        return msgspec.convert(parse_toml(data.decode()), Schedule)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the schedule of faults {path} cannot be used: {error}; kinds are {', '.join(KINDS)}",
            path=str(path),
        ) from error


def check_targets(schedule: Schedule, names: Sequence[str], *, broker: bool) -> None:
    """Check that each fault has a target in the run.

    Args:
        schedule: the faults.
        names: the devices.
        broker: True if the run has a broker of its own.

    Raises:
        ConfigError: if a target is unknown.
    """
    for fault in schedule.faults:
        known = {SERVER, EVERYBODY, *names}
        if fault.kind in ("kill", "stop") and broker:
            known.add(BROKER)
        if fault.target not in known:
            raise ConfigError(
                f"a fault of kind {fault.kind} has the target {fault.target!r}; give it one of {', '.join(sorted(known))}",
                target=fault.target,
            )
