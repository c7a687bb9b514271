"""Plain rounds: that the update is the one that seed, data and bundle give, whatever the task asks for."""

from __future__ import annotations

import msgspec
import numpy as np

from edgefl.conformance.case import Group
from edgefl.conformance.play.stage import Stage
from edgefl.conformance.verdict import expect, expect_equal

ROUNDS = Group.called("rounds")


@ROUNDS.case("Trains a round, and sends an update with the expected tensors, samples and metrics.")
def plain_round(stage: Stage) -> None:
    stage.good_round()


@ROUNDS.case(
    "Walks through its rows in the shuffled order of (seed, stream), around the end and on, B rows a step."
)
def batches(stage: Stage) -> None:
    stage.good_round(stage.material().with_steps(9), seed=123456)


@ROUNDS.case("Takes seeds of 62 bits and more as they are.")
def large_seed(stage: Stage) -> None:
    stage.good_round(seed=2**62 + 1)
    stage.good_round(seed=2**63 - 1)
