"""Capacity of a device, for which a submodel is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgefl.errors import ConfigError
from edgefl.system.sizes import parse_rate, parse_size


@dataclass(frozen=True, init=False)
class Device:
    """Capacity of a device. A value of 0 means unknown or unlimited.

    Args:
        memory: bytes above the idle process, or a text such as ``"64MiB"``.
        downlink: bytes per second from the server, or a text such as ``"1MB/s"``.
        uplink: bytes per second to the server, or a text such as ``"8Mbit/s"``.
        compute: multiply-accumulates (MACs) per second.
        round_seconds: longest duration of a round in seconds.
        samples: rows of data on the device; 0 for as many as the steps of a round read.

    Raises:
        ConfigError: if a text is not a size or rate.

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
    """Return ``value``, parsed by ``parse`` if it is a text. Raise ConfigError with the argument's name if that fails."""
    try:
        return parse(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"argument `{name}`: {error}", argument=name) from error
