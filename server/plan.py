"""Everything the service needs to know about a run, as plain data: composed from a federation file, or by a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgefl.submodels.submodel import Region
from edgefl.wire.bundle import Bundle
from edgefl.wire.limits import Limits
from edgefl.wire.tensors import Arrays
from server.coordinator import Outcome, Rules

Evaluate = Callable[[Arrays], Mapping[str, float]]
"""Metrics of a global model; ``accuracy`` and ``loss`` are shown to people."""


@dataclass(frozen=True)
class TierPlan:
    """What a tier downloads, and which global tensors its updates hold."""

    bundle: Bundle
    regions: Mapping[str, Region]


@dataclass(frozen=True)
class Plan:
    """One run of a federation. ``digest`` names the configuration: a run is resumed under the same one only.

    ``initial`` holds float tensors by global name, each below one of ``units``. ``rules.run`` is filled in by the
    service. ``evaluate`` is called every ``evaluate_every`` rounds (0: never) and after the last one.
    """

    federation: str
    digest: str
    rules: Rules
    tiers: Mapping[str, TierPlan]
    units: tuple[str, ...]
    initial: Arrays
    hyper: Mapping[str, float]
    lr_decay_at: tuple[float, ...] = ()
    evaluate: Evaluate | None = None
    evaluate_every: int = 1
    limits: Limits = Limits()  # noqa: RUF009  frozen

    def hyper_at(self, number: int) -> dict[str, float]:
        """Scalars of round ``number`` (from 1): ``lr`` is divided by 10 at each fraction of the rounds that has passed."""
        passed = sum(1 for fraction in self.lr_decay_at if number - 1 >= fraction * self.rules.rounds - 1e-9)
        scaled = {"lr": self.hyper["lr"] / 10.0**passed} if "lr" in self.hyper else {}
        return {**self.hyper, **scaled}

    def evaluates(self, number: int, outcome: Outcome) -> bool:
        """Whether the model after round ``number`` is to be evaluated."""
        if self.evaluate is None or self.evaluate_every == 0:
            return False
        last = number == self.rules.rounds
        return last or (outcome == "closed" and number % self.evaluate_every == 0)
