"""What programs send over a real broker: as many floats for each parameter as their papers' tables say, and headers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from edgefl.bench.programs.figures import FIGURES, ROUND
from tests.conftest import BrokerProcess
from tests.e2e.runs import on_both_engines, run_to_the_end
from tests.e2e.tap import Tap

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
D = 64 * 48 + 48 + 48 * 10 + 10
DEVICES, ROUNDS, FLOAT = 2, 4, 4
HEADERS = 3000
"""Most bytes of an update that are no tensors: names and shapes, metrics, times; and of each thing that is fetched."""
CONFIG = """
[federation]
name = "{federation}"
[model]
name = "mlp"
options = {{ hidden = [48] }}
[program]
name = "{program}"
batch = 8
steps = 3
lr = 0.02
[data]
name = "digits"
train_samples = 90
test_samples = 100
[tiers.strong]
cut = 0
count = {devices}
[downlink]
compression = "none"
[broker]
kind = "external"
port = {port}
"""


def run(program: str, engine: str, federation: str, tap: Tap, folder: Path) -> list[dict[str, Any]]:
    config = CONFIG.format(federation=federation, program=program, devices=DEVICES, port=tap.address.port)
    return run_to_the_end(folder, ["--rounds", str(ROUNDS), "--seed", "7", "--engine", engine], config)


@on_both_engines
@pytest.mark.parametrize("program", ["fedavg", "scaffold", "fafed"])
def test_the_bytes_of_a_round_are_those_of_its_table(
    program: str, engine: str, federation: str, mosquitto: BrokerProcess, tmp_path: Path
) -> None:
    figures, tap = FIGURES[program, ROUND], Tap(mosquitto.address)
    rows = run(program, engine, federation, tap, tmp_path / "run")

    up: dict[str, dict[str, int]] = defaultdict(dict)
    for packet in tap.packets("in", "/updates/"):
        number = packet.topic.partition("/updates/")[2].partition("/")[0]
        up[number][packet.topic] = packet.payload  # an update that is sent again counts once
    opening = FIGURES.get((program, "opening"))
    for number in range(1, ROUNDS + 1):
        floats = opening.up if opening and number == 1 else figures.up
        beyond = sum(up[str(number)].values()) - DEVICES * floats * D * FLOAT
        assert 0 < beyond < DEVICES * HEADERS, f"round {number}"
    # Bundles come with the first two exchanges; from then on it is weights and memory.
    for row in rows[2:]:
        beyond = row["down_bytes"] - DEVICES * figures.down * D * FLOAT
        assert 0 < beyond < DEVICES * HEADERS
    fetched = sum(packet.payload for packet in tap.packets("out", "/blobs/"))
    assert sum(row["down_bytes"] for row in rows) == fetched
    tap.close()
