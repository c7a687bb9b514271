"""How many workers a server has, and where they run."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.wire.mqtt.address import Address
from server.coordinator.states import Rules
from server.run_spec import RunSpec
from server.shards.crew import Hire, most_workers
from server.shards.process import ProcessHand
from server.shards.words import Told


@dataclass(frozen=True)
class Workers:
    """``count`` workers (0 or 1: the server takes all updates itself), each of which ``hire`` starts.

    ``updates``: where the bytes of updates go, a folder or an fsspec URL that all of them reach; by default a folder of the
    run.
    """

    count: int = 0
    hire: Hire = ProcessHand
    updates: str = ""

    def told(
        self, spec: RunSpec, rules: Rules, address: Address, database: str, updates: str, *, enrolled: bool
    ) -> Told:
        """What they are told of a run."""
        return Told(
            worker=0,
            workers=most_workers(self.count) if self.count > 1 else 1,
            federation=spec.federation,
            rules=rules,
            limits=spec.limits,
            address=address,
            database=database,
            updates=updates,
            enrolled=enrolled,
        )


ALONE = Workers()
