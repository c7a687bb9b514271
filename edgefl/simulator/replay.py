"""Replay of a run from its journal: the updates as received, added in the order of their arrival.

Sums are integers, so the order has no effect within a round. In asynchronous rounds it decides which round counts an
update, and the journal stores that. The same updates in the same rounds give the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from edgefl.errors import ConfigError, StoreError
from edgefl.simulator.downlink import SimulatedDownlink
from edgefl.wire import tensors
from edgefl.wire.mqtt.messages import Update, decode
from edgefl.wire.tensors import Arrays
from edgefl_server.coordinator.collapse import NEVER, BestMetrics
from edgefl_server.coordinator.states import OpenRound, Outcome
from edgefl_server.events import DeviceEvaluation
from edgefl_server.publish.model import ModelVersion
from edgefl_server.rounds import RoundModel, begin_aggregation, conclude_round, evaluate_reports
from edgefl_server.run_spec import RunSpec
from edgefl_server.storage.journal import Journal, RunRecord


@dataclass(frozen=True)
class ReplayedRound:
    """Result of a replayed round.

    Attributes:
        round: Number of the round.
        outcome: ``closed`` or ``abandoned``.
        updates: Number of updates that the round counted.
        late: Number of these that began from an earlier model.
        weights_sha256: SHA-256 of the model after the round, as replayed.
        journaled: SHA-256 of that model according to the journal.
        weights: The replayed model with the server's state, by name.
        evaluation: Results of an evaluation round, from the reports in the journal; None for a training round.
        journaled_evaluation: Results of it according to the journal.
    """

    round: int
    outcome: Outcome
    updates: int
    late: int
    weights_sha256: str
    journaled: str
    weights: Arrays
    evaluation: DeviceEvaluation | None = None
    journaled_evaluation: DeviceEvaluation | None = None

    @property
    def same(self) -> bool:
        """True if both digests are equal, and the results of an evaluation round, too."""
        return (self.weights_sha256, self.evaluation) == (self.journaled, self.journaled_evaluation)


class Replay:
    """Replay of a run from its journal: computes the model of every round again, from the updates as received.

    Args:
        spec: Run spec with the run's configuration.
        journal: Journal of the run.
        run: Row of the run in the journal.
        initial: Model before the first round.
        folder: Folder for the encoder of the published models.
        device: Torch device on which updates are summed.

    Raises:
        ConfigError: If the run has another configuration or began from another model.
    """

    def __init__(
        self,
        spec: RunSpec,
        journal: Journal,
        run: RunRecord,
        initial: Arrays,
        folder: Path,
        device: str = "auto",
    ) -> None:
        if run.digest != spec.digest:
            raise ConfigError(
                f"the journal holds run {run.run} of federation {spec.federation!r} under another configuration, or other "
                "code: pass the federation file that it was run with (`config`), and use that release and those files",
                run=run.run,
            )
        # Whether a round counts is in the journal, and what was undone is not repeated.
        self._spec = replace(spec, rollback=NEVER, rules=replace(spec.rules, run=run.run))
        self._journal = journal
        self._run = run.run
        self._device = device
        self._downloads = SimulatedDownlink(spec, folder, run.run)
        self._versions = journal.versions(run.run)
        self._models = {1: ModelVersion.of(spec, 0, initial)}
        known = self._versions.get(1)
        if known is not None and known.model_version != self._models[1].version:
            raise ConfigError(
                f"run {run.run} began from model {known.model_version[:12]}, and this is {self._models[1].version[:12]}: "
                "name the folder of the run, whose checkpoints have the first one"
            )

    def rounds(self) -> Iterator[ReplayedRound]:
        """Yield every finished round, in order. Stop at a round that is still open.

        Raises:
            StoreError: If the bytes of an update are missing or changed.
        """
        self._downloads.publish(self._models[1])
        for number, outcome, facts in self._journal.outcomes(self._run):
            if outcome == "open":
                return
            ended = self._journal.ended_round(self._run, number)
            closed = outcome == "closed"
            weights, updates, late, evaluation = (
                self._repeat_round(ended, int(facts["devices"]))
                if closed
                else (self._models[number].weights, 0, 0, None)
            )
            model = ModelVersion.of(self._spec, number, weights)
            self._downloads.publish(model)
            self._models[number + 1] = model
            self._models.pop(number - self._spec.rules.max_staleness, None)
            digest = hashlib.sha256(tensors.dump(weights)).hexdigest()
            ending: Outcome = "closed" if closed else "abandoned"
            known = facts.get("evaluation") if closed else None
            yield ReplayedRound(
                round=number,
                outcome=ending,
                updates=updates,
                late=late,
                weights_sha256=digest,
                journaled=facts["weights_sha256"],
                weights=weights,
                evaluation=evaluation,
                journaled_evaluation=msgspec.convert(known, DeviceEvaluation) if known else None,
            )

    def _repeat_round(
        self, ended: OpenRound, devices: int
    ) -> tuple[Arrays, int, int, DeviceEvaluation | None]:
        """Return (model after a round, number of its updates, number of those that began from an earlier model,
        results of an evaluation round).

        Raises:
            StoreError: The bytes of an update are missing or changed.
        """
        model, spec = self._models[ended.number], self._spec
        start = self._round_model(model)
        active = begin_aggregation(
            spec,
            ended,
            start,
            device=self._device,
            sums=None,
            older={number: self._round_model(self._models[number]) for number in ended.older},
        )
        updates = late = 0
        for stored in self._journal.accepted(self._run, ended.number):
            if hashlib.sha256(stored.data).hexdigest() != stored.sha256:
                raise StoreError(
                    f"the update of {stored.device} that round {ended.number} took has other bytes than were accepted: "
                    "restore the run's folder",
                    device=stored.device,
                    round=ended.number,
                )
            update = decode(Update, stored.data)
            active.aggregator.add(active.check(update).added, stored.weight, stored.share)
            updates, late = updates + 1, late + (update.round < ended.number)
        done = conclude_round(spec, ended, active, start, devices=devices, best=BestMetrics())
        if ended.evaluates and not ended.measures:
            return done.weights, updates, late, evaluate_reports(spec, ended.number, active, done.weights)
        return done.weights, updates, late, None

    def _round_model(self, model: ModelVersion) -> RoundModel:
        return RoundModel(model, self._downloads)


def differences(ours: Arrays, theirs: Arrays) -> dict[str, int]:
    """Return, by name, the number of entries of a tensor of ``ours`` that differ in ``theirs``. Equal tensors are left
    out.

    A tensor that is missing in ``theirs`` or has another shape counts with all its entries. Tensors only in
    ``theirs`` are ignored.
    """
    counts = {
        name: int((array != theirs[name]).sum())
        if name in theirs and theirs[name].shape == array.shape
        else array.size
        for name, array in ours.items()
    }
    return {name: count for name, count in counts.items() if count}
