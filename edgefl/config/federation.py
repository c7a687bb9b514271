"""Federation: all tables of a federation file, validated together."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field, model_validator

from edgefl.config import tables
from edgefl.config.rounds import (
    AggregateTable,
    DownlinkTable,
    EvaluateTable,
    RoundTable,
    SelectionTable,
    ServerTable,
    SimulationTable,
)
from edgefl.config.tables import Activations, BrokerTable, ConfigTable
from edgefl.errors import ConfigError
from edgefl.wire.bundle.formats import FORMATS, FormatName
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.topics import checked_name
from edgefl.wire.text import describe_unknown

# The table of a federation file that puts other bundles on trial with a share of the devices.


class CandidateTierTable(ConfigTable):
    """Settings of a tier that a rollout tries on a part of the tier's devices; None keeps the tier's value."""

    memory_budget: str | None = Field(None, description="another budget of the tier's graphs")
    activations: Activations | None = Field(None, description="another way to keep what waits")

    @model_validator(mode="after")
    def _something(self) -> CandidateTierTable:
        if self.memory_budget is None and self.activations is None:
            raise ValueError("a candidate for a tier differs in something: set memory_budget or activations")
        return self


class RolloutTable(ConfigTable):
    """Trial of other settings (`algorithm`, `tiers`) by a share of each tier's devices; then all use them, or none."""

    share: float = Field(
        0.1, gt=0, lt=1, description="of a tier's devices, rounded up; one at least does not try it"
    )
    rounds: int = Field(5, ge=1, description="rounds of the trial")
    most_loss_increase: float = Field(
        0.05,
        ge=0,
        description="how much higher than that of the others of its tier the candidate's training loss may be, as a share",
    )
    most_failures: float = Field(
        0.1,
        ge=0,
        le=1,
        description="how much larger than that of the others the share of its tasks may be that give no update",
    )
    most_slowdown: float = Field(
        1.5,
        gt=0,
        description="how many times as long as those of the others its local steps may take in a round",
    )
    algorithm: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of the table `algorithm` that the candidate has other values for",
    )
    tiers: dict[str, CandidateTierTable] = Field(
        default_factory=dict,
        description="[rollout.tiers.NAME]: the same for a tier's memory_budget and activations",
    )

    @property
    def on(self) -> bool:
        """True if the table has other settings to try, so that there is a rollout."""
        return bool(self.algorithm or self.tiers)


class Federation(tables.ConfigTable):
    """All tables of a federation file, validated together.

    They are ``federation``, ``model``, ``loss``, ``algorithm``, ``optimizer``, ``data``, ``round``, ``evaluate``,
    ``selection``, ``rollout``, ``tiers``, ``export``, ``codec``, ``aggregate``, ``downlink``, ``broker``, ``server``,
    ``simulation``, ``tracking`` and ``limits``.
    """

    federation: tables.FederationTable = tables.FederationTable()
    model: tables.ModelTable = tables.ModelTable()
    loss: tables.LossTable = tables.LossTable()
    algorithm: tables.AlgorithmTable = tables.AlgorithmTable()
    optimizer: tables.OptimizerTable = tables.OptimizerTable()
    data: tables.DataTable = tables.DataTable()
    round: RoundTable = RoundTable()
    evaluate: EvaluateTable = EvaluateTable()
    selection: SelectionTable = SelectionTable()
    rollout: RolloutTable = RolloutTable()
    tiers: dict[str, tables.TierTable] = Field(default_factory=dict, description="one table per tier")
    export: tables.ExportTable = tables.ExportTable()
    codec: tables.CodecTable = tables.CodecTable()
    aggregate: AggregateTable = AggregateTable()
    downlink: DownlinkTable = DownlinkTable()
    broker: BrokerTable = BrokerTable()
    server: ServerTable = ServerTable()
    simulation: SimulationTable = SimulationTable()
    tracking: tables.TrackingTable = tables.TrackingTable()
    limits: dict[str, float] = Field(default_factory=dict, description="any of edgefl.wire.limits.Limits")

    def __repr__(self) -> str:
        tiers = ", ".join(self.tiers) or "one tier"
        return (
            f"Federation({self.federation.name!r}, {self.federation.rounds} rounds of {self.algorithm.name}: "
            f"{self.model.name} on {self.data.name}, {tiers})"
        )

    def __str__(self) -> str:
        return repr(self)

    @model_validator(mode="after")
    def _consistent(self) -> Federation:
        problems = []
        for name in self.tiers:
            try:
                checked_name("tier", name)
            except ConfigError as error:
                problems.append(error.message)
        wrong = describe_unknown(self.limits, Limits.__struct_fields__)
        problems += [f"limits.{problem}; `edgefl validate --template` lists all" for problem in wrong]
        try:
            problems += [] if wrong else self.wire_limits.oversized()
        except msgspec.ValidationError as error:
            problems.append(f"limits: {error}")
        if self.round.count == "nonzero" and self.aggregate.rule != "mean":
            problems.append(
                f"aggregate.rule {self.aggregate.rule} takes all devices that hold an entry: choose round.count "
                "holders, or the rule mean"
            )
        problems += self._buffered_problems()
        if self.server.workers > 1 and self.aggregate.rule != "mean":
            problems.append(
                f"aggregate.rule {self.aggregate.rule} looks at all updates of a round at once, which no worker has: set "
                "server.workers to 0, or choose the rule mean"
            )
        if self.server.ray and self.server.workers < 2:
            problems.append(
                "server.ray is where workers run: set server.workers to 2 or more, or leave ray out"
            )
        if self.tiers and (strangers := sorted(self.simulation.tiers.keys() - self.tiers.keys())):
            problems.append(
                f"simulation.tiers has {', '.join(strangers)}, and the tiers are {', '.join(self.tiers)}: use their names"
            )
        if self.tiers and (strangers := sorted(self.selection.quotas.keys() - self.tiers.keys())):
            problems.append(
                f"selection.quotas has {', '.join(strangers)}, and the tiers are {', '.join(self.tiers)}: use their names"
            )
        if self.tiers and (strangers := sorted(self.rollout.tiers.keys() - self.tiers.keys())):
            problems.append(
                f"rollout.tiers has {', '.join(strangers)}, and the tiers are {', '.join(self.tiers)}: use their names"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _buffered_problems(self) -> list[str]:
        """Return a text for each setting that asynchronous rounds (``round.mode buffered``) do not support; [] in
        other modes.
        """
        problems: list[str] = []
        if self.round.mode != "buffered":
            return problems
        if self.downlink.encoding == "int8":
            problems.append(
                "downlink.encoding int8 sends what changed since the version before, and with round.mode buffered devices "
                "begin from several versions at a time: choose float16 or float32"
            )
        if self.rollout.on:
            problems.append(
                "rollout compares the tasks of the same rounds, and with round.mode buffered they are of several: roll out "
                "in mode synchronous"
            )
        if self.evaluate.split:
            problems.append(
                "evaluate.split holds rows out for evaluation rounds, and with round.mode buffered there are none: set "
                "it to 0"
            )
        chosen = self.selection
        if chosen.policy != "uniform" or chosen.measured or chosen.quorum:
            problems.append(
                "selection.policy, measured and quorum choose the devices of a round, and with round.mode buffered the "
                "next one is drawn as soon as there is a place: leave them out"
            )
        if self.server.workers > 1:
            problems.append(
                "server.workers take the updates of one round, and with round.mode buffered several are under way: set "
                "server.workers to 0"
            )
        return problems

    def formats_of(self, tier: str) -> tuple[FormatName, ...]:
        """Return the formats in which the bundles of ``tier`` are exported, in the order of ``FORMATS``.

        They are ``export.formats``, and the format of the tier's engine if `edgefl run` starts devices of the tier, or if
        ``export.formats`` is empty.
        """
        table, shared_formats = self.tiers.get(tier, tables.TierTable()), self.export.formats
        needed = (table.engine,) if table.count or not shared_formats else ()
        return tuple(name for name in FORMATS if name in (*shared_formats, *needed))

    @property
    def wire_limits(self) -> Limits:
        """Sizes and timeouts of messages: those of the table ``limits``, and defaults for the rest."""
        return msgspec.convert(self.limits, Limits, strict=False)


def without_devices(federation: Federation) -> Federation:
    """Return ``federation`` with one device in each tier, for commands that start no devices.

    If any tier has devices, return ``federation`` itself.
    """
    tiers = federation.tiers
    if any(table.count for table in tiers.values()):
        return federation
    return federation.model_copy(
        update={"tiers": {name: table.model_copy(update={"count": 1}) for name, table in tiers.items()}}
    )
