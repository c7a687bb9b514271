"""Who a device is to the server: its tier, and whether a round may select it. Pure functions."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from edgefl.system.sizes import mebibytes
from edgefl.wire.mqtt.messages import UNKNOWN_CONDITIONS, Conditions


@dataclass(frozen=True)
class TierRule:
    """Who belongs to a tier: device-name patterns first, then reported memory in bytes.

    ``raised_bytes`` is what its rounds take on devices, where that is more than planned.
    """

    name: str
    patterns: tuple[str, ...] = ()
    memory_bytes: int = 0
    raised_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """A device the server has heard of. ``tier`` is empty when no tier fits it; ``seen`` is epoch seconds.

    ``unfit`` says why its ``conditions`` keep it out of rounds (:mod:`edgefl_server.coordinator.eligibility`); empty:
    they do not.
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
        """Whether a round may select it as long as it is there: it has a tier, and is in the conditions for it."""
        return bool(self.tier) and not self.unfit

    def eligible(self, now: float, grace_s: float) -> bool:
        """Whether a round may select it: it is usable, and is online or went offline less than ``grace_s`` ago."""
        return self.usable and (self.online or now - self.seen < grace_s)


def gone(device: Device) -> Device:
    """The device as one that is away, and that nobody expects back."""
    return replace(device, online=False, seen=0.0)


def tier_of(tiers: Sequence[TierRule], device: str, memory_bytes: int, known: str = "") -> str:
    """The tier with the longest pattern that matches (the first of equals), else the largest whose memory it has.

    The longest, because ``half-*`` also matches the devices of a tier ``half-slow``. "" if none fits. A tier that was raised
    keeps the devices that it has: ``known`` is the device's.
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


def described(tiers: Sequence[TierRule]) -> str:
    """``strong (devices strong-*), weak (32.0 MiB or more)``: the tiers there are, and who belongs to each."""
    return ", ".join(f"{tier.name} ({_takes(tier)})" for tier in tiers)


def _takes(tier: TierRule) -> str:
    needed = max(tier.memory_bytes, tier.raised_bytes)
    memory = [f"{mebibytes(needed)} or more"] if needed else []
    return " or ".join([*(f"devices {pattern}" for pattern in tier.patterns), *memory]) or "every device"


def eligible(devices: Mapping[str, Device], now: float, grace_s: float) -> list[str]:
    """Names of the devices a round may select, sorted."""
    return sorted(name for name, device in devices.items() if device.eligible(now, grace_s))


def share(fraction: float, count: int) -> int:
    """``ceil(fraction * count)``, at most ``count``; the tiny subtraction undoes 0.1 * 30 = 3.0000000000000004."""
    return min(count, math.ceil(fraction * count - 1e-9))


def sample(seed: int, round_number: int | str, names: Iterable[str], count: int) -> list[str]:
    """``count`` of ``names``, uniformly by (seed, round), sorted. ``round_number`` may also name a draw within a round.

    Names are ranked by a hash of their own, so one more device displaces at most one of the others.
    """
    return sorted(heapq.nsmallest(count, names, key=places(seed, round_number)))


def places(seed: int, round_number: int | str) -> Callable[[str], bytes]:
    """Where each name stands in the draw of a round: the least are selected first."""
    before = hashlib.sha256(_text("select", seed, round_number, "").encode())

    def place(name: str) -> bytes:
        # As of the whole text: most of a large fleet is hashed and not chosen.
        own = before.copy()
        own.update(name.encode())
        return own.digest()

    return place


def task_seed(seed: int, round_number: int, device: str, turn: int = 0) -> int:
    """Seed of a device's batches and noise in one round, in [0, 2**63); another one for each ``turn``."""
    return int.from_bytes(_digest("task", seed, round_number, device, *_turn(turn))[:8], "big") >> 1


def task_nonce(run: str, seed: int, round_number: int, device: str, turn: int = 0) -> str:
    """Name of a device's answer in one round of one run; the same again after a restart."""
    return _digest("nonce", run, seed, round_number, device, *_turn(turn)).hex()[:24]


def _turn(turn: int) -> tuple[int, ...]:
    return (turn,) if turn else ()


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(_text(*parts).encode()).digest()


def _text(*parts: object) -> str:
    return "/".join(map(str, parts))
