"""Selection and a rollout as a user runs them: real broker, real devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import require_mosquitto
from tests.e2e.runs import TINY, run_to_the_end

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
[rollout.program]
steps = 4
momentum = 0.5
[tiers.strong]
count = 4
"""
)


def test_all_take_part_alike_and_a_candidate_that_is_no_worse_is_promoted(tmp_path: Path) -> None:
    require_mosquitto()
    arguments = ["--rounds", "6", "--seed", "7", "--broker", "mosquitto"]
    rows = run_to_the_end(tmp_path / "run", arguments, FLEET)

    assert [(row["outcome"], row["reports"]) for row in rows] == [("closed", 2)] * 6
    assert [row["fairness"] for row in rows[1::2]] == [1.0, 1.0, 1.0], (
        "after each two rounds all have as many"
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "audit.jsonl").read_text().splitlines()]
    accepted = [line["event"] for line in lines if line["event"]["event"] == "updateaccepted"]
    tiers = {number: [each["tier"] for each in accepted if each["round"] == number] for number in range(1, 7)}
    tried = [each["device"] for each in accepted if each["round"] <= 4 and each["tier"] == "strong@candidate"]
    assert len(tried) == 2 and len(set(tried)) == 1, "one device, in two of four rounds"
    assert tiers[5] == tiers[6] == ["strong@candidate"] * 2
