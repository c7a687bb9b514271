"""How many workers a server has, and where they run."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.config.serving import ServerTable
from edgefl.errors import ConfigError
from edgefl.wire.mqtt.address import Address
from edgefl_server.coordinator.states import Rules
from edgefl_server.run_spec import RunSpec
from edgefl_server.shards.actors import Actors
from edgefl_server.shards.crew import Hire, most_workers
from edgefl_server.shards.messages import Told
from edgefl_server.shards.process import ProcessHand


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
        """What they are told of a run. ConfigError where its updates cannot be dealt out."""
        if self.count > 1:
            _check(spec)
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


def workers_of(table: ServerTable) -> Workers:
    """Those that a federation file asks for. ConfigError for a Ray that is not installed."""
    hire = Actors(table.ray, most_workers(table.workers)) if table.ray else ProcessHand
    return Workers(table.workers, hire, table.updates)


def _check(spec: RunSpec) -> None:
    rule = spec.aggregate.rule
    if rule.buffered:
        raise ConfigError(
            f"the rule {rule.name} looks at all updates of a round at once, which no worker has: set server.workers to 0, "
            "or choose the rule mean",
            rule=rule.name,
        )
    own = [each.server.name for each in spec.exchanges if each.server.unfolds]
    if own:
        raise ConfigError(
            f"the server's step {own[0]!r} makes something else of each update before it is added, for which workers have "
            "no torch: set server.workers to 0",
            step=own[0],
        )
