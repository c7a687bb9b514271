"""Selection and a rollout of a federation file: compiled tiers, a real broker, real devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl_server.events import UpdateAccepted
from tests.conftest import BrokerProcess
from tests.e2e.inside import train
from tests.e2e.runs import TINY

pytestmark = pytest.mark.e2e

# Of four devices half train in each round, and one tries more steps of momentum for three rounds.
FLEET = (
    TINY
    + """
[round]
fraction = 0.5
min_devices = 4
[selection]
policy = "longest-idle"
measured = true
[rollout]
share = 0.25
rounds = 4
most_slowdown = 100
most_loss_increase = 100
[rollout.algorithm]
steps = 4
momentum = 0.5
[tiers.strong]
count = 4
"""
)


def test_a_fair_candidate_is_promoted(broker: BrokerProcess, federation: str, tmp_path: Path) -> None:
    trained = train(tmp_path / "run", FLEET, broker.address, federation, rounds=6)

    assert trained.outcomes == [("closed", 2, 0)] * 6
    assert [closed.fairness for closed in trained.rounds[1::2]] == [1.0, 1.0, 1.0], (
        "after each two rounds all have as many"
    )
    accepted = [event for event in trained.events if isinstance(event, UpdateAccepted)]
    tiers = {number: [each.tier for each in accepted if each.round == number] for number in range(1, 7)}
    tried = [each.device for each in accepted if each.round <= 4 and each.tier == "strong@candidate"]
    assert len(tried) == 2 and len(set(tried)) == 1, "one device, in two of four rounds"
    assert tiers[5] == tiers[6] == ["strong@candidate"] * 2
