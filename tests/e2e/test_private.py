"""Private layers never leave a device: no message over a broker holds the bytes of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from edgefl.wire import tensors
from edgefl.wire.tensors import Arrays
from edgefl_device.store.database import Store
from tests.conftest import BrokerProcess, on_other_broker
from tests.e2e.inside import train
from tests.e2e.runs import TINY
from tests.e2e.tap import Tap

pytestmark = pytest.mark.e2e
ROUNDS = 3
CONFIG = TINY.replace("batch = 8", 'name = "fedper"\nbatch = 8\nlr = 0.1') + (
    '[downlink]\ncompression = "none"\n[tiers.all]\ncount = 2\n'
)


def private_of(folder: Path) -> list[Arrays]:
    """Private tensors of all rounds that a device's store still has."""
    store = Store(folder, limit_bytes=1 << 24, history_rounds=5)
    stored = [tensors.load(store.carry(each) or b"") for each in store.carries()]
    store.close()
    return [{name: array for name, array in each.items() if name.startswith("private.")} for each in stored]


@on_other_broker
def test_no_message_holds_a_private_tensor(broker: BrokerProcess, federation: str, tmp_path: Path) -> None:
    tap = Tap(broker.address)
    trained = train(tmp_path / "run", CONFIG, tap.address, federation, ROUNDS)
    tap.close()

    assert trained.outcomes == [("closed", 2, 0)] * ROUNDS
    messages = [packet.content for packet in (*tap.packets("in"), *tap.packets("out"))]
    checkpoints = trained.folder / "checkpoints"
    first, last = (load_file(checkpoints / f"round-{number:04}.safetensors") for number in (1, ROUNDS))
    own = [
        private for n in (0, 1) for private in private_of(trained.folder / "devices" / f"all-{n}" / "store")
    ]
    assert len(own) >= 2 and all(
        each.keys() == {"private.head.dense.weight", "private.head.dense.bias"} for each in own
    )
    for private in own:
        for name, array in private.items():
            assert (array != last[name.removeprefix("private.")]).any()
            assert not any(array.tobytes() in message for message in messages), name
    # The shared part of the same round does travel, so the search finds what there is.
    assert any(first["dense1.dense.weight"].tobytes() in message for message in messages)
    assert (first["head.dense.weight"] == last["head.dense.weight"]).all()
