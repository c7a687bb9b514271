"""What algorithms send over a real broker: as many floats for each parameter as their papers' tables say, and headers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.algorithms import FIGURES, ROUND
from tests.conftest import BrokerProcess
from tests.e2e.inside import train
from tests.e2e.runs import ONE_EACH, TINY
from tests.e2e.tap import Tap

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
D = 64 * 48 + 48 + 48 * 10 + 10
DEVICES, ROUNDS, FLOAT = 2, 4, 4
HEADERS = 3000
"""Most bytes of an update that are no tensors: names and shapes, metrics, times; and of each thing that is fetched."""
CONFIG = TINY.replace("[8]", "[48]") + '[downlink]\ncompression = "none"\n' + ONE_EACH


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fafed"])
def test_the_bytes_of_a_round_are_those_of_its_table(
    algorithm: str, federation: str, mosquitto: BrokerProcess, tmp_path: Path
) -> None:
    figures, tap = FIGURES[algorithm, ROUND], Tap(mosquitto.address)
    config = CONFIG.replace("batch = 8", f'name = "{algorithm}"\nbatch = 8\nlr = 0.02')
    trained = train(tmp_path / "run", config, tap.address, federation, ROUNDS)

    up: dict[str, dict[str, int]] = defaultdict(dict)
    for packet in tap.packets("in", "/updates/"):
        number = packet.topic.partition("/updates/")[2].partition("/")[0]
        up[number][packet.topic] = packet.payload  # an update that is sent again counts once
    opening = FIGURES.get((algorithm, "opening"))
    for number in range(1, ROUNDS + 1):
        floats = opening.up if opening and number == 1 else figures.up
        beyond = sum(up[str(number)].values()) - DEVICES * floats * D * FLOAT
        assert 0 < beyond < DEVICES * HEADERS, f"round {number}"
    # Bundles come with the first two exchanges; from then on it is weights and memory.
    for closed in trained.rounds[2:]:
        beyond = closed.down_bytes - DEVICES * figures.down * D * FLOAT
        assert 0 < beyond < DEVICES * HEADERS
    fetched = sum(packet.payload for packet in tap.packets("out", "/blobs/"))
    assert sum(closed.down_bytes for closed in trained.rounds) == fetched
    tap.close()
