"""Federations of strong, moderate and weak clients, for EmbracingFL and for width reduction (embracingfl.md 3.6, 9.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reproduce.embracingfl.small_models import POOLED
from reproduce.entry import Scale, Settings

Method = Literal["EmbracingFL", "width reduction"]
EMBRACING: Method = "EmbracingFL"
WIDTH: Method = "width reduction"
WIDTHS: Mapping[str, float] = {"moderate": 0.45, "weak": 0.2}
"""Channels that width reduction keeps (embracingfl.md 5)."""
HEADLINE: Mapping[Method, str] = {EMBRACING: "global", WIDTH: "static"}
"""Batch norm that each has in the paper's main tables (embracingfl.md 2.7)."""


@dataclass(frozen=True)
class Mix:
    """Clients of each tier, in sixteenths of all: the paper's mixes divide so."""

    strong: int
    moderate: int = 0
    weak: int = 0

    @property
    def counts(self) -> Mapping[str, int]:
        return {"strong": self.strong, "moderate": self.moderate, "weak": self.weak}


SIXTEENTHS = 16
CASES: Mapping[int, Mix] = {
    1: Mix(16),
    2: Mix(8, moderate=8),
    3: Mix(4, moderate=12),
    4: Mix(2, moderate=14),
    5: Mix(8, weak=8),
    6: Mix(4, weak=12),
    7: Mix(2, weak=14),
    8: Mix(4, 4, 8),
    9: Mix(2, 4, 10),
    10: Mix(2, 2, 12),
}


@dataclass(frozen=True)
class Images:
    """The image federation of a scale: ``cuts`` are units that moderate and weak clients freeze."""

    clients: int
    model: Mapping[str, object]
    cuts: Mapping[str, int]
    settings: Settings


_ALGORITHM: Settings = {"algorithm.momentum": 0.9, "algorithm.weight_decay": 1e-4}
_RESNET8_CUTS = {"moderate": 2, "weak": 3}
IMAGES: Mapping[Scale, Images] = {
    "smoke": Images(
        clients=16,
        model={"model.name": POOLED, "model.options": {"pool": 4, "widths": [5, 5, 10]}},
        cuts=_RESNET8_CUTS,
        settings={
            "data.name": "cifar10",
            "data.train_samples": 320,
            "data.test_samples": 100,
            "federation.rounds": 2,
            "algorithm.batch": 4,
            "algorithm.steps": 1,
            "algorithm.lr": 0.1,
            **_ALGORITHM,
        },
    ),
    "cpu": Images(
        clients=16,
        model={"model.name": POOLED, "model.options": {"pool": 4}},
        cuts=_RESNET8_CUTS,
        settings={
            "data.name": "cifar10",
            "data.train_samples": 4000,
            "data.test_samples": 1000,
            "federation.rounds": 40,
            "algorithm.batch": 32,
            "algorithm.steps": 5,
            "algorithm.lr": 0.1,
            "round.evaluate_every": 2,
            **_ALGORITHM,
        },
    ),
    "paper": Images(
        clients=128,
        model={"model.name": "resnet20", "model.options": {}},
        cuts={"moderate": 4, "weak": 7},
        settings={
            "data.name": "cifar10_jpeg",
            "data.test_samples": 0,
            "federation.rounds": 1000,
            "algorithm.batch": 32,
            "algorithm.steps": 10,
            "algorithm.lr": 0.4,
            "round.evaluate_every": 5,
            **_ALGORITHM,
        },
    ),
}


def image_settings(
    scale: Scale,
    mix: Mix,
    method: Method = EMBRACING,
    *,
    bn: str = "",
    fraction: float = 1.0,
    absent: int = 0,
) -> dict[str, object]:
    """``bn``: global or static; "": the method's own. ``fraction`` of the clients takes part at scale paper, all of them at
    others: with two strong clients of 16, one round in two would have none (embracingfl.md 9.2). ``absent``: sixteenths
    that hold samples and never take part.
    """
    images = IMAGES[scale]
    unit = images.clients // SIXTEENTHS
    options: Any = images.model["model.options"]
    tiers: dict[str, object] = {
        tier: _tier(tier, count * unit, method, images.cuts) for tier, count in mix.counts.items() if count
    }
    settings: dict[str, object] = {
        "data.partition": "dirichlet",
        "data.alpha": 0.1,
        "round.lr_decay_at": [0.8, 0.9],
        **images.settings,
        "model.name": images.model["model.name"],
        "model.options": {**options, "bn": bn or HEADLINE[method]},
    }
    if scale == "paper" and fraction < 1.0:
        settings["round.fraction"] = fraction
    if absent:
        tiers["absent"] = _tier("absent", absent * unit, EMBRACING, {})
        settings["simulation.absent"] = ["absent-*"]
    return settings | {"tiers": tiers}


def _tier(name: str, count: int, method: Method, cuts: Mapping[str, int]) -> dict[str, object]:
    base: dict[str, object] = {"count": count, "devices": [f"{name}-*"]}
    if name not in WIDTHS:
        return base
    if method == WIDTH:
        return base | {"kind": "width", "options": {"ratio": WIDTHS[name], "rounding": "floor"}}
    return base | {"cut": cuts[name], "chunks": 2 if name == "weak" else 1}
