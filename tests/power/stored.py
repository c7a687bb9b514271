"""``python -m tests.power.stored FOLDER``: a device's store over three rounds, in a process that is recorded.

Prints ``sends NONCE`` where the outbox would publish an update, and ``settled NONCE`` where the server's word is stored.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from edgefl_device.store.database import Checkpoint, Outgoing, PastRound, Store

ROUNDS = 3
LIMIT_BYTES = 1 << 30


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def main(folder: Path) -> None:
    store = Store(folder, limit_bytes=LIMIT_BYTES, history_rounds=10)
    for number in range(1, ROUNDS + 1):
        nonce = f"nonce-{number}"
        store.open_job(nonce.encode())
        weights = np.full(3000, number, np.float32)
        store.save_checkpoint(nonce, Checkpoint(1, {}, iter([("w", weights)]), ""))
        update = Outgoing("run", number, nonce, weights.tobytes())
        store.finish_job(update, carry=b"carry of " + nonce.encode(), carry_name="run/p/t")
        say(f"sends {nonce}")
        past = PastRound(run="run", round=number, tier="t", nonce=nonce, outcome="accepted")
        store.settle(past)
        say(f"settled {nonce}")
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
