"""The federation that a fleet is measured in: nothing is trained or evaluated, updates of a size that is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgefl.config import Federation, parse
from edgefl.lab.generator.settings import Shares
from edgefl.setup.tiers import completed
from edgefl.wire.errors import ConfigError

NAME, TIER = "bench-fleet", "fleet"

_UNTIL_REST = 3
"""Rounds after which devices without a task listen no more: two without one, and the one that they say it in."""

_ECHO = {"name": "edgefl.bench.common.echo:echo", "steps": 0}
_RESNET = {"model": {"name": "resnet20"}, "data": {"name": "random"}}


def _mlp(data: str, channels: int, size: int, hidden: int) -> dict[str, Any]:
    options = {"in_channels": channels, "size": size, "hidden": [hidden]}
    return {"model": {"name": "mlp", "options": options}, "data": {"name": data}}


UPDATES: dict[str, dict[str, Any]] = {
    "dense": _RESNET,
    "onebit": {**_RESNET, "codec": {"name": "scaled_sign"}},
    "middle": _mlp("random", 3, 32, 26),
    "small": _mlp("digits", 1, 8, 10),
}
"""Tables of a federation by the size of its updates: 1.1 MB and 37 KB (ResNet-20), 321 KB and 3 KB (dense layers)."""


@dataclass(frozen=True)
class Case:
    """``devices`` connect, ``selected`` of them get a task in each of ``rounds`` rounds, after ``uncounted`` others.

    ``workers`` are the server's; all else is of the devices, as in :class:`edgefl.lab.generator.settings.Load`.
    """

    devices: int
    selected: int = 0
    update: str = "dense"
    rounds: int = 5
    workers: int = 1
    deadline_s: float = 120.0
    fetch: bool = False
    train_s: float = 0.0
    progress_s: float = 0.0
    away_s: float = 30.0
    shares: Shares = field(default_factory=Shares)

    def __post_init__(self) -> None:
        if self.update not in UPDATES:
            raise ConfigError(
                f"no update {self.update!r}; there are: {', '.join(UPDATES)}", update=self.update
            )
        if self.selected > self.devices:
            raise ConfigError(
                f"{self.selected} of {self.devices} devices cannot be selected: connect more of them"
            )

    @property
    def tasks(self) -> int:
        return self.selected or self.devices

    @property
    def uncounted(self) -> int:
        """Rounds before those that count: kernels load in the first, and devices without tasks listen until they rest."""
        return 1 if self.tasks == self.devices else 1 + _UNTIL_REST

    def __str__(self) -> str:
        return f"{self.devices:,} devices, {self.tasks:,} selected, {self.update}"


def federation_of(case: Case, port: int) -> Federation:
    """The file of the server; the broker listens on ``port``."""
    tables: dict[str, Any] = {
        "federation": {"name": NAME, "rounds": case.rounds + case.uncounted},
        "program": _ECHO,
        "round": {
            "evaluate_every": 0,
            "min_devices": case.devices,
            "min_reports": 1,
            "fraction": case.tasks / case.devices,
        },
        "tiers": {TIER: {"cut": 0, "count": 1, "devices": [f"{TIER}-*"]}},
        "broker": {"kind": "external", "port": port},
        "limits": {"round_deadline_s": case.deadline_s, "ready_timeout_s": 3600.0},
        **UPDATES[case.update],
    }
    if case.workers > 1:
        tables["server"] = {"workers": case.workers}
    return completed(parse(tables, source="the benchmark"))
