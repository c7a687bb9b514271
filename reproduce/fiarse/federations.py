"""The federations of FIARSE's experiments: one data set, model and spread of clients, and what each method changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

from reproduce.entry import Scale, Settings

Options = Mapping[str, Any]
EARLY_EXITS = "edgefl.models.exits:early_exits"
SMALL_RESNET = "reproduce.fiarse.model:small_resnet"


@dataclass(frozen=True)
class Setup:
    """What all arms of an experiment have alike. ``sizes``: with ``clients`` of each; ``per_round`` of all take part."""

    sizes: tuple[float, ...]
    clients: int
    per_round: int
    rounds: int
    steps: int
    lr: float = 0.1
    keep_every: int = 0
    model: Options = field(default_factory=dict)
    data: Options = field(default_factory=dict)
    batch: int = 20

    def settings(self, tiers: Mapping[str, Options], **keys: Any) -> Settings:
        """A federation of these tiers; ``keys`` are dotted ones with ``__`` in place of the dot."""
        count = self.clients * len(self.sizes)
        return {
            **{f"model.{name}": value for name, value in self.model.items()},
            **{f"data.{name}": value for name, value in self.data.items()},
            "federation.rounds": self.rounds,
            "round.fraction": self.per_round / count,
            "round.evaluate_every": 0,
            "simulation.keep_every": self.keep_every,
            "algorithm.batch": self.batch,
            "algorithm.steps": self.steps,
            "algorithm.lr": self.lr,
            "algorithm.weight_decay": 0.0,
            **{name.replace("__", "."): value for name, value in keys.items()},
            "tiers": tiers,
        }

    def tiers(self, kind: str, options: Options | None = None, *each: Options) -> dict[str, Options]:
        """A tier of ``kind`` for every size, the smallest first; ``each``: options of one tier alone."""
        own = each or ({},) * len(self.sizes)
        return {
            f"size{number}": {
                "kind": kind,
                "gamma": gamma,
                "count": self.clients,
                "devices": [f"size{number}-*"],
                "options": {**(options or {}), **special},
            }
            for number, (gamma, special) in enumerate(zip(self.sizes, own, strict=True))
        }


def fiarse(setup: Setup, options: Options | None = None, **keys: Any) -> Settings:
    """Importance submodels, trained with TCB-GD."""
    tiers = setup.tiers("importance", options)
    return setup.settings(tiers, **{"algorithm__name": "tcbgd", "algorithm__momentum": 0.0, **keys})


def structured(setup: Setup) -> Settings:
    """The same by whole channels (fiarse.md 8.3, R5)."""
    return setup.settings(
        setup.tiers("importance_structured"), algorithm__name="tcbgd", algorithm__momentum=0.0
    )


def heterofl(setup: Setup) -> Settings:
    """The first channels, HeteroFL's scaler and its loss over the classes that a client has."""
    return _width(setup, {"scaler": True}, algorithm__masked_loss=True)


def fedrolex(setup: Setup) -> Settings:
    """A window of channels that moves on by one in each round."""
    return _width(setup, {"rolling": True})


def fjord(setup: Setup) -> Settings:
    """Ordered dropout: every step trains one of the sizes up to the client's own."""
    return _width(setup, {"ordered": True, "widths": [sqrt(gamma) for gamma in setup.sizes]})


def scalefl(setup: Setup, exits: Sequence[int]) -> Settings:
    """The units up to an exit, ``exits`` by size (counted from 1), narrowed until they fit."""
    deepest = exits[-1]
    each = [{"exit": exit} if exit < deepest else {} for exit in exits]
    base = {**setup.model.get("options", {}), "base": setup.model["name"]}
    if bn := setup.model.get("bn"):
        base["bn"] = bn
    with_exits = replace(setup, model={"name": EARLY_EXITS, "options": base})
    return with_exits.settings(
        with_exits.tiers("early_exit", {}, *each), algorithm__name="multi_exit", algorithm__momentum=0.0
    )


def _width(setup: Setup, options: Options, **keys: Any) -> Settings:
    return setup.settings(
        setup.tiers("width", options), algorithm__name="sgd", algorithm__momentum=0.0, **keys
    )


_STATIC: Options = {"bn": "static"}
FASHION: Options = {
    "name": "fashion_mnist",
    "train_samples": 12_000,
    "test_samples": 2_000,
    "partition": "dirichlet_equal",
    "alpha": 0.3,
}
CIFAR10: Options = {
    "name": "cifar10_jpeg",
    "test_samples": 0,
    "partition": "dirichlet_equal",
    "alpha": 0.3,
}
IMAGES: Mapping[Scale, Setup] = {
    "smoke": Setup(
        (1 / 16, 1 / 4, 1.0),
        clients=2,
        per_round=3,
        rounds=2,
        steps=2,
        keep_every=2,
        model={"name": SMALL_RESNET, "options": {**_STATIC, "widths": (8, 8, 16)}},
        data={**FASHION, "train_samples": 600, "test_samples": 100},
    ),
    "cpu": Setup(
        (1 / 16, 1 / 4, 1.0),
        clients=10,
        per_round=6,
        rounds=50,
        steps=25,
        keep_every=5,
        model={"name": SMALL_RESNET, "options": _STATIC},
        data=FASHION,
    ),
    "paper": Setup(
        (1 / 64, 1 / 16, 1 / 4, 1.0),
        clients=25,
        per_round=10,
        rounds=800,
        steps=125,
        keep_every=20,
        model={"name": "resnet18", "bn": "static"},
        data=CIFAR10,
    ),
}
"""Images: fiarse.md 9.2 (tier 1, reduced) and the paper's own CIFAR-10."""

REPEATED: Mapping[Scale, Setup] = {
    **IMAGES,
    "smoke": replace(IMAGES["smoke"], model={"name": "mlp", "options": {"hidden": [32, 16]}}),
}
"""The same for entries beside the first, whose smoke need not try the convolutional net again."""
