"""The federations of FAFED's experiments: what all methods have alike, and what each of them adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reproduce.entry import Settings

Options = Mapping[str, Any]

FAFED, STEM, FEDADAM, FEDAMS, SCAFFOLD, FEDAVG = "FAFED", "STEM", "FedAdam", "FedAMS", "SCAFFOLD", "FedAvg"
METHODS = (FAFED, STEM, FEDADAM, FEDAMS, SCAFFOLD, FEDAVG)
_ALGORITHMS: Mapping[str, str] = {FAFED: "fafed", STEM: "stem", SCAFFOLD: "scaffold"}
_OPTIMIZERS: Mapping[str, str] = {FEDADAM: "fedadam", FEDAMS: "fedams"}
TAU = 0.01
"""Of FedAdam and FedAMS, as rho of FAFED (fafed.md 4.4)."""


@dataclass(frozen=True)
class Tuned:
    """Options of a method: ``algorithm`` of what clients do, ``server`` of the server's optimizer, for those that have
    one."""

    algorithm: Options
    server: Options = field(default_factory=dict)


def tuned(lr: float, *, fafed: Options, fedadam: Options, fedams: Options) -> Mapping[str, Tuned]:
    """Return the options of all :data:`METHODS` if all but FAFED have one client step size ``lr``; STEM's alpha is 0.9."""
    return {
        FAFED: Tuned(fafed),
        STEM: Tuned({"lr": lr, "alpha": 0.9}),
        FEDADAM: Tuned({"lr": lr}, fedadam),
        FEDAMS: Tuned({"lr": lr}, fedams),
        SCAFFOLD: Tuned({"lr": lr}),
        FEDAVG: Tuned({"lr": lr}),
    }


@dataclass(frozen=True)
class Setup:
    """Settings that all methods share: batch b, q ``steps``, all ``clients`` in every round. ``looked_at``: training
    samples on which the models that are kept are judged."""

    clients: int
    rounds: int
    batch: int
    steps: int
    model: Options
    data: Options
    keep_every: int = 1
    evaluate_every: int = 1
    together: int = 1
    looked_at: int = 1_000

    def federation(self, algorithm: Options, optimizer: Options | None = None) -> Settings:
        """Settings of a federation in which clients run ``algorithm``."""
        return {
            **{f"model.{name}": value for name, value in self.model.items()},
            **{f"data.{name}": value for name, value in self.data.items()},
            "federation.rounds": self.rounds,
            "round.evaluate_every": self.evaluate_every,
            "simulation.keep_every": self.keep_every,
            "simulation.together": self.together,
            "algorithm": {**algorithm, "batch": self.batch, "steps": self.steps},
            **({"optimizer": optimizer} if optimizer else {}),
            "tiers": {"strong": {"count": self.clients, "devices": ["strong-*"]}},
        }

    def method(self, name: str, tuned: Tuned) -> Settings:
        """One of :data:`METHODS`; FedAvg, FedAdam and FedAMS have plain local SGD."""
        algorithm = {"name": _ALGORITHMS[name]} if name in _ALGORITHMS else sgd()
        optimizer = (
            {"name": _OPTIMIZERS[name], "options": {"tau": TAU, **tuned.server}}
            if name in _OPTIMIZERS
            else None
        )
        return self.federation({**algorithm, **tuned.algorithm}, optimizer)


def sgd() -> dict[str, Any]:
    """Return plain SGD: the paper mentions no momentum and no weight decay."""
    return {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}
