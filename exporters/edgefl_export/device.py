"""Capacity of a device, for which a submodel is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgefl.errors import ConfigError
from edgefl.system.sizes import parse_rate, parse_size


@dataclass(frozen=True, init=False)
class Device:
    """Capacity of a device; 0 is unknown, or no limit.

    ``memory`` is in bytes over its idle process, or like ``"64MiB"``; ``downlink`` and ``uplink`` in bytes per second, or
    like ``"1MB/s"`` and ``"8Mbit/s"``; ``compute`` in MACs per second, and ``round_seconds`` is what a round may take.
    ``samples`` is how many rows it has; 0: as many as a round's steps read. ConfigError for a text that is no size or rate.

    >>> edgefl.Device(memory="64MiB", uplink="8Mbit/s")
    Device(memory=67108864, downlink=0.0, uplink=1000000.0, compute=0.0, round_seconds=0.0, samples=0)
    """

    memory: int
    downlink: float
    uplink: float
    compute: float
    round_seconds: float
    samples: int

    def __init__(
        self,
        memory: int | str = 0,
        downlink: float | str = 0.0,
        uplink: float | str = 0.0,
        compute: float = 0.0,
        round_seconds: float = 0.0,
        samples: int = 0,
    ) -> None:
        values = {
            "memory": _read("memory", memory, parse_size),
            "downlink": _read("downlink", downlink, parse_rate),
            "uplink": _read("uplink", uplink, parse_rate),
            "compute": compute,
            "round_seconds": round_seconds,
            "samples": samples,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _read(name: str, value: float | str, parse: Callable[[str], float]) -> float:
    """Return a number as it is; ConfigError, naming the argument, for a text that ``parse`` refuses."""
    try:
        return parse(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"argument `{name}`: {error}", argument=name) from error
