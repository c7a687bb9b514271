"""A server whose program needs every device and can begin again, to be killed: see :mod:`tests.server.service.kill_me`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.session import Address
from server.events import Event
from server.service import Service
from tests.server.fleet import needing_carry, plan_for


def main(port: int, federation: str, out: Path) -> None:
    def emit(event: Event) -> None:
        print(msgspec.json.encode(event).decode(), flush=True)

    limits = Limits(chunk_bytes=1024, reconnect_min_s=0.02, reconnect_max_s=0.1)
    plan = plan_for(federation, limits, rounds=4, min_devices=2, whole=True, opening=1)
    opening = replace(plan.main, hyper={"lr": 9.0})
    plan = replace(plan, opening=(opening,), tiers=needing_carry(plan.tiers))
    Service(plan, Address("127.0.0.1", port), out, emit=emit).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
