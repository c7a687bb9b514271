"""Pilot: learning rate and momentum of each method, chosen on samples held out from training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reproduce.entry import Arm, Choice, Entry, Scale
from reproduce.fiarse.federations import CHOSEN, FOUR, TEXT_FOUR, TEXTS, arm

METHODS = [method for method in CHOSEN if method not in ("Pruning-greedy", "FIARSE (layerwise)")]
IMAGE_GRID = ((0.1, 0.0), (0.1, 0.9), (0.01, 0.0), (0.01, 0.9))
"""The paper's learning rates and momenta (Table 3)."""
TEXT_GRID = tuple((lr, scaler) for scaler in (0.0, 1.0) for lr in (0.01, 0.003, 0.001))
"""The paper's highest learning rate and two above it, because here the model was not trained before."""
GRIDS = {method: TEXT_GRID if method.endswith(TEXTS) else IMAGE_GRID for method in METHODS}
GRIDS["FIARSE, AGNews"] = TEXT_GRID[:3]


def arms(scale: Scale) -> Sequence[Arm]:
    """Return an arm for each method and candidate, with half of the rounds and a tenth of the samples held out."""
    made: list[Arm] = []
    for method, grid in GRIDS.items():
        if setup := (TEXT_FOUR if method.endswith(TEXTS) else FOUR).get(scale):
            rounds = max(2, setup.shared["federation.rounds"] // 2)
            half = {**setup.shared, "federation.rounds": rounds, "data.validation": 0.1}
            made += [arm(method, replace(setup, shared=half), f" {each}", each) for each in grid]
    return made


ENTRY = Entry(
    name="fiarse/pilot",
    title="Pilot: learning rates",
    arms=arms,
    choices=[Choice(m, {str(each): f"{m} {each}" for each in grid}, "global") for m, grid in GRIDS.items()],
    note="Learning rate and momentum, on texts the rate with (1) or without (0) HeteroFL's scaler, by the accuracy on a "
    "tenth of the training samples, on which nobody trains: half of the rounds, 10 % participants, the sizes of Table 1.",
    seeds={"smoke": 1, "cpu": 1, "paper": 1},
)
