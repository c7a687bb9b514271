"""Runs over a broker that edgefl does not start: aedes, beside Mosquitto. Models are the same to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import BrokerProcess, Mosquitto
from tests.e2e.conftest import FLEET, ROUNDS
from tests.e2e.inside import edgefl, train
from tests.e2e.runs import TINY, Calm, rows
from tests.other_brokers.brokers import Aedes

pytestmark = pytest.mark.e2e
PRIVATE = TINY.replace("batch = 8", 'name = "fedper"\nbatch = 8\nlr = 0.1') + (
    '[downlink]\nencoding = "int8"\n[tiers.all]\ncount = 2\n'
)
ADAPTED = TINY.replace("batch = 8", 'name = "per_fedavg"\nbatch = 8\nlr = 0.1') + "[tiers.all]\ncount = 2\n"


def test_aedes_trains_the_model_that_mosquitto_trains(
    mosquitto: BrokerProcess, aedes: BrokerProcess, federation: str, tmp_path: Path
) -> None:
    digests = [
        [
            each.weights_sha256
            for each in train(tmp_path / name, PRIVATE, broker.address, federation, 3).rounds
        ]
        for name, broker in (("mosquitto", mosquitto), ("aedes", aedes))
    ]

    assert len(digests[0]) == 3 and digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Mosquitto, Aedes])
def test_killed_processes_and_a_restarted_broker_change_no_bit(
    kind: Callable[[Path], BrokerProcess], tmp_path: Path, calm: Calm
) -> None:
    with kind(tmp_path) as broker:
        table = f'[broker]\nkind = "external"\nhost = "127.0.0.1"\nport = {broker.port}\n'
        run = calm.beside(tmp_path / "run", config=FLEET + table)
        run.wait_until(lambda: len(run.rounds) >= 1, "first round")
        run.wait_until(
            lambda: rows(run, "weak-0", "checkpoint") > 0 or len(run.rounds) >= 3, "training of weak-0"
        )
        run.kill("server", "weak-0")
        run.wait_until(lambda: len(run.rounds) >= 3, "third round")
        broker.kill()  # with all retained messages, sessions and queues
        run.kill("strong-0")
        broker.start()

        again = run.finish()

    assert len(again) == ROUNDS
    assert [row["weights_sha256"] for row in again] == [row["weights_sha256"] for row in calm.rounds]


@pytest.mark.slow
def test_a_model_is_personalized_to_the_same_bits(
    mosquitto: BrokerProcess, aedes: BrokerProcess, federation: str, tmp_path: Path
) -> None:
    digests = set()
    for name, broker in (("mosquitto", mosquitto), ("aedes", aedes)):
        trained = train(tmp_path / name, ADAPTED, broker.address, federation, 1)
        device, out = trained.folder / "devices" / "all-0", tmp_path / f"{name}.safetensors"
        told = ("--broker", str(broker.address), "--federation", federation, "--id", "all-0", "--out", out)
        adapted = edgefl(
            "device", "personalize", *told, "--data", device / "data.npz", "--store", device / "store"
        )
        assert adapted.returncode == 0, adapted.stderr
        digests.add(hashlib.sha256(out.read_bytes()).hexdigest())

    assert len(digests) == 1
