"""What the owner of a device lets it do, and when: a file in TOML.

::

    train = true                    # whether it takes tasks at all
    profile = false                 # whether it measures bundles for whoever asks
    mirrors = false                 # whether weights may come by mirrors that the server names (its own ones always)
    charging = true                 # only on mains power
    unmetered = true                # only on a link that costs nothing
    quiet = ["22:00-07:00"]         # not in these hours of the day
    bytes_a_day = "200MiB"          # over the link, both ways
    duty = 0.5                      # share of the time in which steps are made
    tell = true                     # whether the server is told of power, link and heat, and whether it may train now
    surroundings = ["board-state"]  # a command that prints what the system does not say (edgefl_device/conditions.py)

    [commands]                      # how to ask where the system does not say; exit code 0 is yes
    unmetered = ["/usr/local/bin/is-unmetered"]

A device that declines for its policy says so with a reason, and the round goes on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from edgefl.errors import ConfigError, RoundDeclined
from edgefl.system.sizes import parse_size, size
from edgefl.wire.mqtt.messages import POLICY
from edgefl.wire.text import unknown

Condition = Literal["charging", "unmetered"]
Work = Literal["train", "profile"]

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_COMMAND_S = 10.0
_SUPPLIES = Path("/sys/class/power_supply")
_NETWORK_MANAGER = "org.freedesktop.NetworkManager"
_METERED = (
    *("busctl", "--system", "--auto-start=no", "get-property"),
    *(_NETWORK_MANAGER, "/org/freedesktop/NetworkManager", _NETWORK_MANAGER, "Metered"),
)


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's keys; ``bytes_a_day`` is a size or a number of bytes, 0 for no limit."""

    train: bool = True
    profile: bool = True
    mirrors: bool = True
    charging: bool = False
    unmetered: bool = False
    quiet: tuple[str, ...] = ()
    bytes_a_day: str | int = 0
    duty: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    tell: bool = True
    surroundings: tuple[str, ...] = ()
    commands: dict[Condition, tuple[str, ...]] = {}

    @property
    def most_bytes(self) -> int:
        return parse_size(self.bytes_a_day) if isinstance(self.bytes_a_day, str) else self.bytes_a_day

    @property
    def hours(self) -> tuple[tuple[int, int], ...]:
        """The quiet hours as minutes of the day, from and to."""
        found = [_HOURS.fullmatch(text) for text in self.quiet]
        return tuple(
            (60 * int(each[1]) + int(each[2]), 60 * int(each[3]) + int(each[4])) for each in found if each
        )


def read_policy(path: Path) -> Policy:
    """The policy in a file; ConfigError names the file and what is wrong with it."""
    import tomllib  # most devices have no such file, and idle ones are to be small

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        if wrong := unknown(table, Policy.__struct_fields__):
            raise ValueError(f"{wrong[0]}; the keys are {', '.join(Policy.__struct_fields__)}")
        policy = msgspec.convert(table, Policy)
        wrong = [text for text in policy.quiet if not _HOURS.fullmatch(text)]
        if wrong:
            raise ValueError(f"quiet hours are like 22:00-07:00, found {wrong[0]!r}")
        if policy.most_bytes < 0:
            raise ValueError(f"bytes_a_day is at least 0, found {policy.most_bytes}")
    except (OSError, ValueError, RecursionError) as error:  # msgspec's and tomllib's are ValueErrors
        raise ConfigError(f"the policy {path} cannot be used: {error}", path=str(path)) from error
    return policy


Ask = Callable[[Condition], bool | None]
"""Whether a condition holds; None if nobody knows."""


def asked_of_system(commands: Mapping[Condition, tuple[str, ...]]) -> Ask:
    """Asks the command of a condition where there is one, else the system (Linux knows of mains power, and NetworkManager of
    links that cost)."""

    def ask(condition: Condition) -> bool | None:
        if command := commands.get(condition):
            return _succeeds(command)
        return on_mains() if condition == "charging" else not_metered(output_of(_METERED))

    return ask


def on_mains(supplies: Path = _SUPPLIES) -> bool | None:
    """Whether the machine has power that does not run out; None if the system does not say."""
    kinds: dict[str, list[str]] = {}
    if not supplies.is_dir():
        return None
    for supply in sorted(supplies.iterdir()):
        with suppress(OSError):
            kind = (supply / "type").read_text().strip()
            state = supply / ("status" if kind == "Battery" else "online")
            kinds.setdefault("battery" if kind == "Battery" else "mains", []).append(
                state.read_text().strip()
            )
    batteries = kinds.get("battery", [])
    if "1" in kinds.get("mains", []) or any(status in ("Charging", "Full") for status in batteries):
        return True
    return not batteries  # without one it runs on mains, or does not run


def not_metered(told: str) -> bool | None:
    """What NetworkManager's property Metered says, as ``busctl`` prints it: yes (1), no (2), and what it takes to be so (3
    and 4); None where it does not know, or is not there."""
    return {"u 1": False, "u 2": True, "u 3": False, "u 4": True}.get(told.strip())


def output_of(command: tuple[str, ...]) -> str:
    """What a command prints; nothing if it cannot be run, fails, or takes too long."""
    done = _run(command)
    return done[1].decode(errors="replace") if done is not None and done[0] == 0 else ""


def _succeeds(command: tuple[str, ...]) -> bool | None:
    done = _run(command)
    return done[0] == 0 if done is not None else None


def _run(command: tuple[str, ...]) -> tuple[int, bytes] | None:
    """A command's exit code and output."""
    import subprocess

    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.returncode, done.stdout


@dataclass(frozen=True)
class Rules:
    """A policy, and how to find out what it depends on. ``traffic`` tells the bytes of a day; ``now`` the time of day."""

    policy: Policy
    ask: Ask
    traffic: Callable[[str], int]
    now: Callable[[], time.struct_time] = time.localtime

    def check(self, work: Work) -> None:
        """RoundDeclined, with a reason for people, if ``work`` is not allowed, or not now."""
        if why := self.why_not(work):
            raise RoundDeclined(POLICY, f"the policy of this device does not allow it: {why}")

    def why_not(self, work: Work) -> str:
        """Why ``work`` is not allowed, or not now; empty if it is."""
        policy, now = self.policy, self.now()
        if not (policy.train if work == "train" else policy.profile):
            return f"{work} is false"
        minute = 60 * now.tm_hour + now.tm_min
        for text, (start, stop) in zip(policy.quiet, policy.hours, strict=True):
            within = start <= minute < stop if start <= stop else minute >= start or minute < stop
            if within:
                return f"these are quiet hours ({text})"
        if policy.most_bytes and (used := self.traffic(day_of(now))) >= policy.most_bytes:
            return f"{size(used)} went over the link today, of {size(policy.most_bytes)}"
        conditions: tuple[tuple[bool, Condition], ...] = (
            (policy.charging, "charging"),
            (policy.unmetered, "unmetered"),
        )
        for wanted, condition in conditions:
            holds = self.ask(condition) if wanted else True
            if holds is None:
                return f"nobody knows whether it is {condition}: name a command in [commands]"
            if not holds:
                return f"it is not {condition}"
        return ""


def day_of(now: time.struct_time) -> str:
    """The day as the store counts it."""
    return time.strftime("%Y-%m-%d", now)
