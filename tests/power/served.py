"""``python -m tests.power.served PORT FEDERATION OUT``: two rounds of the tiny plan, in a process that is recorded."""

from __future__ import annotations

import sys
from pathlib import Path

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl_server.service import Service
from tests.server.fleet import plan_for
from tests.support.listeners import CallingListener

ROUNDS = 2
DEVICES = ("strong-0", "weak-0")


def main(port: int, federation: str, out: Path) -> None:
    limits = Limits(chunk_bytes=4096, reconnect_min_s=0.02, reconnect_max_s=0.1)
    plan = plan_for(federation, limits, rounds=ROUNDS, min_devices=len(DEVICES))
    Service(
        plan, Address("127.0.0.1", port), out, listener=CallingListener(lambda _: None), device="cpu"
    ).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
