"""A server of the tiny plan as a process, for tests that kill it: ``python -m tests.server.service.kill_me PORT NAME
OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.session import Address
from server.events import Event
from server.service import Service
from tests.server.fleet import plan_for


def main(port: int, federation: str, out: Path) -> None:
    def emit(event: Event) -> None:
        print(msgspec.json.encode(event).decode(), flush=True)

    limits = Limits(chunk_bytes=1024, reconnect_min_s=0.02, reconnect_max_s=0.1)
    plan = plan_for(federation, limits, rounds=3, min_devices=3, deadline_s=60.0)
    Service(plan, Address("127.0.0.1", port), out, emit=emit).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
