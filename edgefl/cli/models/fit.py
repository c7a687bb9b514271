"""What a device offers, from options, a file or its hello, and the submodels that fit it: for `plan` and `export`."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edgefl.system.forks import processes_for
from edgefl.wire.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from edgefl.config import Federation
    from edgefl.models.spec import ModelSpec
    from edgefl.submodels.submodel import Submodel
    from exporters.device import Device
    from exporters.fit import Fit


class Wishes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a device file. ``memory`` is a size over the idle process, like 64MiB; links are 1MB/s or 8Mbit/s;
    ``compute`` is in GMAC/s. What is left out is unknown, or the program's own (``batch``, ``steps``)."""

    memory: str | int = ""
    downlink: str = ""
    uplink: str = ""
    compute: float = 0.0
    round_seconds: float = 0.0
    batch: int = 0
    steps: int = 0
    samples: int = 0
    kinds: list[str] = []
    gamma: list[float | str] = []

    def or_else(self, other: Wishes) -> Wishes:
        """These wishes, and those of ``other`` where they say nothing."""
        return msgspec.structs.replace(other, **{name: value for name, value in self._told()})

    def _told(self) -> list[tuple[str, Any]]:
        return [(name, value) for name in self.__struct_fields__ if (value := getattr(self, name))]

    @property
    def device(self) -> Device:
        """ConfigError, which names the argument, for a memory or a rate that is none, or negative numbers."""
        from exporters.device import Device

        wrong = [
            name
            for name, value in self._told()
            if isinstance(value, int | float) and not 0 <= value < math.inf
        ]
        if wrong:
            raise ConfigError(f"argument `{wrong[0]}` is a number from 0 on, found {getattr(self, wrong[0])}")
        return Device(
            memory=str(self.memory) if self.memory else 0,
            downlink=self.downlink or 0.0,
            uplink=self.uplink or 0.0,
            compute=self.compute * 1e9,
            round_seconds=self.round_seconds,
            samples=self.samples,
        )


def read_device(path: Path) -> Wishes:
    """The wishes in a TOML file; ConfigError that names what is wrong with it."""
    try:
        wishes = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Wishes, strict=False)
    except FileNotFoundError as error:
        raise ConfigError(f'there is no device file {path}; write one with memory = "64MiB"') from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        known = ", ".join(Wishes.__struct_fields__)
        raise ConfigError(f"{path} is no device file: {error}; it has the keys {known}") from error
    try:
        wishes.device  # noqa: B018  whether it is one
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message.replace('argument ', '').replace('`', '')}") from error
    return wishes


def read_hello(path: Path) -> Wishes:
    """What a saved hello message (msgpack as it was sent, or JSON) says: memory and samples."""
    from edgefl.wire.mqtt.envelope import peek
    from edgefl.wire.mqtt.messages import MALFORMED, Hello

    try:
        data = path.read_bytes()
        hello = msgspec.json.decode(data, type=Hello) if data[:1] == b"{" else peek(Hello, data)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no hello message {path}") from error
    except (*MALFORMED, ProtocolError) as error:
        raise ConfigError(f"{path} is no hello message of a device: {error}") from error
    return Wishes(memory=f"{hello.memory_bytes}B", samples=hello.samples)


def planned(
    federation: Federation, spec: ModelSpec, wishes: Wishes, say: Callable[[str], None] = lambda _: None
) -> Fit:
    """Every submodel of ``spec`` beside the device, trained by the federation's program."""
    from edgefl.api.federation import Training
    from edgefl.api.plan import plan
    from edgefl.setup.model import process_bytes

    training = Training.of(federation)
    return plan(
        spec,
        wishes.device,
        program=lambda submodel: Training.of(suited(federation, submodel)).program,
        codec=training.codec,
        optimizer=training.optimizer,
        kinds=wishes.kinds,
        gammas=gammas(map(str, wishes.gamma)),
        progress=say,
        processes=processes_for(process_bytes(spec)),
    )


def suited(federation: Federation, submodel: Submodel) -> Federation:
    """The federation with a program that makes use of the submodel's thresholds, unless it names one itself."""
    from edgefl.objective.carrier import Thresholded

    if "name" in federation.program.model_fields_set or not isinstance(submodel.carrier, Thresholded):
        return federation
    return federation.model_copy(update={"program": federation.program.model_copy(update={"name": "tcbgd"})})


def overrides(wishes: Wishes) -> dict[str, object]:
    """Keys of the federation that the wishes set."""
    settings = {"program.batch": wishes.batch, "program.steps": wishes.steps}
    return {key: value for key, value in settings.items() if value}


def listed(values: Iterable[str]) -> list[str]:
    """``a,b`` and ``c`` as a, b, c."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def gammas(values: Iterable[str]) -> list[float]:
    """Numbers and fractions like 1/64; ConfigError for anything else. Whether they are sizes is the kinds' business."""
    return [_number(text) for text in listed(values)]


def _number(text: str) -> float:
    top, slash, bottom = text.partition("/")
    try:
        return float(top) / float(bottom) if slash else float(top)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"a gamma is a number like 0.25 or 1/64, found {text!r}", found=text) from error
