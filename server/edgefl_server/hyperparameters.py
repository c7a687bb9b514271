"""Hyperparameters that a round announces to its devices: learning rate, its decay, and what an algorithm schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgefl.errors import ConfigError
from edgefl_server.run_spec import RunSpec

if TYPE_CHECKING:
    from edgefl.contract.algorithm import Algorithm


def round_hyperparameters(spec: RunSpec, number: int, position: int) -> dict[str, float]:
    """Return the scalars that are announced for a round, by name.

    ``lr`` is divided by 10 at each fraction of the training rounds in ``lr_decay_at`` that has passed. Scalars that the
    algorithm schedules replace these.

    Args:
        spec: Specification of the run.
        number: Number of the round, from 1.
        position: Number of exchanges (round trips of the algorithm) that were completed before it.
    """
    exchange = spec.exchange(position)
    rounds, before = spec.rules.rounds, spec.rules.trained_rounds(number - 1)
    decays = sum(1 for fraction in spec.lr_decay_at if before >= fraction * rounds - 1e-9)
    scaled = {"lr": exchange.hyper["lr"] / 10.0**decays} if "lr" in exchange.hyper else {}
    return {**exchange.hyper, **scaled, **exchange.schedule(position, rounds)}


def shared_hyperparameters(algorithms: Mapping[str, Algorithm]) -> dict[str, float]:
    """Return the scalars of an exchange (round trip) by name, from the algorithm of each tier.

    A round announces them once, so all tiers must have the same values.

    Raises:
        ConfigError: If tiers have different values.
    """
    hyper: dict[str, float] = {}
    for tier, algorithm in algorithms.items():
        for name, value in algorithm.hyper.items():
            if hyper.setdefault(name, value) != value:
                raise ConfigError(
                    f"algorithm {algorithm.name!r} has the scalar {name} = {value:g} in tier {tier!r} and "
                    f"{hyper[name]:g} in "
                    "others, and a round announces one value to all: give it one, or make it part of the graphs",
                    algorithm=algorithm.name,
                    tier=tier,
                )
    return hyper
