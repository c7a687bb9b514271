"""Devices and their tiers, and random draws among them. Pure functions."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from edgefl.system.sizes import mebibytes
from edgefl.wire.mqtt.messages import UNKNOWN_CONDITIONS, Conditions

CANDIDATE = "@candidate"
"""Suffix of the tier of a candidate's tasks and bundles, as in ``weak@candidate``. No tier of a file has an ``@``."""


def base_of(tier: str) -> str:
    """Return the tier without the suffix of a candidate: ``weak`` for ``weak@candidate`` and for ``weak``."""
    return tier.removesuffix(CANDIDATE)


@dataclass(frozen=True)
class TierRule:
    """Rule of a tier's membership: name patterns first, then reported memory.

    Attributes:
        name: Name of the tier.
        patterns: Patterns of device names.
        memory_bytes: Required memory.
        raised_bytes: Memory that rounds take on devices, if that is more than planned; otherwise 0.
    """

    name: str
    patterns: tuple[str, ...] = ()
    memory_bytes: int = 0
    raised_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """Device that the server knows.

    Attributes:
        name: Name of the device.
        tier: Its tier; empty if none fits.
        samples: Number of its local samples.
        online: True while it is connected.
        seen: Epoch seconds of its last change.
        conditions: Conditions that it reports.
        unfit: Why its conditions exclude it (:mod:`edgefl_server.coordinator.eligibility`); empty if they do not.
    """

    name: str
    tier: str
    samples: int
    online: bool
    seen: float
    conditions: Conditions = UNKNOWN_CONDITIONS
    unfit: str = ""

    @property
    def usable(self) -> bool:
        """True if a round may select the device while it is online: it has a tier and is in the required conditions."""
        return bool(self.tier) and not self.unfit

    def eligible(self, now: float, grace_s: float) -> bool:
        """Return True if a round may select the device: it is usable, and online or offline for less than ``grace_s``
        seconds.

        ``now`` is in epoch seconds.
        """
        return self.usable and (self.online or now - self.seen < grace_s)


def gone(device: RosterEntry) -> RosterEntry:
    """Return a copy of ``device`` that counts as offline for so long that no round waits for it."""
    return replace(device, online=False, seen=0.0)


def tier_of(tiers: Sequence[TierRule], device: str, memory_bytes: int, known: str = "") -> str:
    """Return the tier of a device, by its name or else by its memory.

    Of the tiers with a matching name pattern, it is the one with the longest pattern; of equally long ones, the first.
    Otherwise it is the tier that requires the most memory of those for which the device has enough. If reports raised
    the requirement of a tier, its devices stay.

    Args:
        tiers: Rules of the tiers.
        device: Name of the device.
        memory_bytes: Memory that it reports.
        known: Tier of the device so far, or empty.

    Returns:
        Name of the tier; empty if none fits.
    """
    matching = [
        (len(pattern), tier) for tier in tiers for pattern in tier.patterns if fnmatchcase(device, pattern)
    ]
    if matching:
        return max(matching, key=lambda found: found[0])[1].name
    fitting = [
        tier
        for tier in tiers
        if max(tier.memory_bytes, tier.raised_bytes * (tier.name != known)) <= memory_bytes
    ]
    return max(fitting, key=lambda tier: tier.memory_bytes).name if fitting else ""


def describe_tiers(tiers: Sequence[TierRule]) -> str:
    """Return the tiers and the devices that they accept as text: ``strong (devices strong-*), weak (32.0 MiB or more)``."""
    return ", ".join(f"{tier.name} ({_takes(tier)})" for tier in tiers)


def _takes(tier: TierRule) -> str:
    needed = max(tier.memory_bytes, tier.raised_bytes)
    memory = [f"{mebibytes(needed)} or more"] if needed else []
    return " or ".join([*(f"devices {pattern}" for pattern in tier.patterns), *memory]) or "every device"


def eligible(devices: Mapping[str, RosterEntry], now: float, grace_s: float) -> list[str]:
    """Return the sorted names of the devices that a round may select.

    They are usable (they have a tier and fit the conditions), and online or offline for less than ``grace_s`` seconds.
    ``now`` is in epoch seconds.
    """
    return sorted(name for name, device in devices.items() if device.eligible(now, grace_s))


def share(fraction: float, count: int) -> int:
    """Return the number of devices that is the ``fraction`` of ``count``, rounded up: at most ``count``.

    Rounding errors such as 0.1 * 30 = 3.0000000000000004 are ignored.
    """
    return min(count, math.ceil(fraction * count - 1e-9))


def sample(seed: int, round_number: int | str, names: Iterable[str], count: int) -> list[str]:
    """Return ``count`` of ``names`` (all if there are fewer), sorted, drawn uniformly by ``seed`` and ``round_number``.

    ``round_number`` may also be a text that identifies a draw within a round. The names with the lowest hashes are
    drawn, so an additional device displaces at most one of the others.
    """
    return sorted(heapq.nsmallest(count, names, key=places(seed, round_number)))


def places(seed: int, round_number: int | str) -> Callable[[str], bytes]:
    """Return the sort key by which a round draws devices: a function from a device's name to bytes.

    The names with the lowest keys are drawn. Keys depend on ``seed`` and ``round_number``.
    """
    before = hashlib.sha256(_text("select", seed, round_number, "").encode())

    def place(name: str) -> bytes:
        # As of the whole text: most of a large fleet is hashed and not chosen.
        own = before.copy()
        own.update(name.encode())
        return own.digest()

    return place


def task_seed(seed: int, round_number: int, device: str, turn: int = 0) -> int:
    """Return the seed of a device's batches and noise in a round, in [0, 2**63).

    ``turn`` is the number of the device's task in that round, if it gets several; each has its own seed.
    """
    return int.from_bytes(_digest("task", seed, round_number, device, *_turn(turn))[:8], "big") >> 1


def task_nonce(run: str, seed: int, round_number: int, device: str, turn: int = 0) -> str:
    """Return the identifier of a device's task in a round of a run, 24 hexadecimal digits. It is the same after a
    restart.

    ``turn`` is the number of the device's task in that round, if it gets several.
    """
    return _digest("nonce", run, seed, round_number, device, *_turn(turn)).hex()[:24]


def _turn(turn: int) -> tuple[int, ...]:
    return (turn,) if turn else ()


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(_text(*parts).encode()).digest()


def _text(*parts: object) -> str:
    return "/".join(map(str, parts))
