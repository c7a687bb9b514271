"""Rounds of a run: the coordinator's state and actions, the current model, and the aggregation of the open round.

The order of the writes makes ``kill -9`` harmless at any time. An update is journaled, then acknowledged. The
checkpoint of a round is written, then its end is journaled, then the next round is announced. After an announcement
the old weights are cleared.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from edgefl.errors import ConfigError, EdgeflError, StoreError
from edgefl.system.clock import Clock
from edgefl.system.memory import release_freed
from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.topics import NO_SHARD
from edgefl_server import events
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.coordinator import machine as coordinator
from edgefl_server.coordinator import states
from edgefl_server.coordinator.backend import perform
from edgefl_server.coordinator.collapse import BestMetrics, best_of
from edgefl_server.coordinator.eligibility import unfit
from edgefl_server.coordinator.fleet import Assignment, Assignments, Devices
from edgefl_server.coordinator.rollout import Trial, count_round
from edgefl_server.coordinator.states import OpenRound, State
from edgefl_server.evaluator import Evaluator, metric_fields
from edgefl_server.memory_plans import MemoryPlans
from edgefl_server.publish.announcements import Announcements
from edgefl_server.publish.downlink import check_counting
from edgefl_server.publish.model import ModelVersion
from edgefl_server.reporter import EventReporter
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.rounds import (
    RoundConclusion,
    RoundModel,
    begin_aggregation,
    conclude_round,
    evaluate_reports,
    sum_up_reports,
)
from edgefl_server.run_spec import RunSpec
from edgefl_server.shards.messages import shard_of
from edgefl_server.shards.pool import WorkerPool
from edgefl_server.storage.checkpoints import Checkpoints
from edgefl_server.storage.journal import DeviceWriteBuffer, Journal, RunRecord
from edgefl_server.storage.retry import ActionFailed, RetryingJournal
from edgefl_server.storage.round_table import EVALUATES, ROLLOUT, TURNOUT
from edgefl_server.updates.receiver import ReceiveResult, UpdateReceiver

_RELEASE_S = 2.0
"""Seconds after a round before its memory is released: the next one may begin at once, and would request it all again."""

_Published = list[BlobRef]


class AnotherConfiguration(ConfigError):
    """Error: the folder holds a run that was begun with other settings or other code."""


@dataclass(frozen=True)
class RunContext:
    """Run that a server begins or continues, and its environment.

    Attributes:
        spec: Specification, with the run's identifier in its rules.
        run: Row of the run in the journal.
        resumed: True if an earlier process began the run.
        device: Processor that sums updates.
        clock: Epoch seconds, never set back.
    """

    spec: RunSpec
    run: RunRecord
    resumed: bool
    device: str
    clock: Clock

    @classmethod
    def find(
        cls, journal: Journal, spec: RunSpec, device: str, clock: Clock, *, evaluate: bool = False
    ) -> RunContext:
        """Return the federation's run in the journal, or a new one, which is not journaled yet.

        Args:
            journal: Journal of the run.
            spec: Specification of the run.
            device: Processor that sums updates.
            clock: Epoch seconds, never set back.
            evaluate: True to add an evaluation to a finished run.

        Raises:
            AnotherConfiguration: If the run was begun with other settings.
            ConfigError: If the downlink's encoding does not suit ``round.count``, or if ``evaluate`` is True and the run
                is not finished or holds out no rows.
            StoreError: If the journal cannot be read.
        """
        forms = {name: tier.form for name, tier in spec.tiers.items()}
        own = [name for name, tier in spec.tiers.items() if tier.published not in ("", *spec.units)]
        check_counting(spec.count, spec.downlink.encoding, forms, own)
        known = journal.latest_run()
        run = known or RunRecord(uuid.uuid4().hex[:16], spec.digest, 1)
        check_configuration(run, spec.federation, spec.digest)
        rules = replace(spec.rules, run=run.run)
        planned = rules.evaluation.planned_rounds(rules.rounds)
        if evaluate:
            _check_evaluation(spec, run.number, planned)
        ended = begun = max(0, run.number - 1 - planned)
        if run.number > planned and known is not None:
            begun += journal.current_round(run.run) is not None
        rules = replace(rules, evaluation=rules.evaluation.continued(ended, begun, more=evaluate))
        spec = replace(spec, rules=rules)
        return cls(spec, run, known is not None, device, clock)


def _check_evaluation(spec: RunSpec, number: int, planned: int) -> None:
    """Raise ConfigError unless a run whose next round is ``number`` can get another evaluation round."""
    if spec.evaluation is None:
        raise ConfigError(
            f"federation {spec.federation!r} holds out no rows, so its devices trained on all: train it with split = 0.2 in "
            "the table [evaluate]"
        )
    if spec.rules.buffered:
        raise ConfigError(
            f"federation {spec.federation!r} has round.mode buffered, in which no round evaluates the model: "
            "evaluate runs of mode synchronous"
        )
    if number <= planned:
        raise ConfigError(
            f"the run of federation {spec.federation!r} is at round {number} of {planned}: let it finish first; `every` in "
            "the table [evaluate] evaluates the model in between",
            round=number,
        )


def check_configuration(run: RunRecord, federation: str, digest: str) -> None:
    """Check that a run of ``federation`` was begun with the configuration of this ``digest``.

    Raises:
        AnotherConfiguration: If the run has another digest.
    """
    if run.digest != digest:
        raise AnotherConfiguration(
            f"the journal holds run {run.run} of federation {federation!r} under another configuration; restore that "
            "configuration or choose another `out`",
            run=run.run,
        )


class RoundDriver:
    """Driver of a run's rounds: :class:`~edgefl_server.coordinator.backend.RoundBackend` of the server.

    Args:
        context: The run and its environment.
        journal: Journal of the run.
        checkpoints: Models after each round.
        announcements: Publisher of models, announcements and tasks.
        receiver: Receiver of updates.
        pool: Workers that receive the updates.
        evaluator: Evaluator of the models.
        reporter: Receives events and warnings for people.
        memory_plans: Memory that tiers require.

    Attributes:
        state: State of the coordinator.
        aggregation: Sums of the open round; None while no round receives updates.
        model: Current model.
        announcements: Publisher of models, announcements and tasks.
        refusal_error: Error that ended the run early; None otherwise.
    """

    def __init__(
        self,
        context: RunContext,
        journal: RetryingJournal,
        checkpoints: Checkpoints,
        announcements: Announcements,
        receiver: UpdateReceiver,
        pool: WorkerPool,
        evaluator: Evaluator,
        reporter: EventReporter,
        memory_plans: MemoryPlans,
    ) -> None:
        self._spec = context.spec
        self._run = context.run
        self._device = context.device
        self._clock = context.clock
        self._journal = journal
        self._policy = journal.policy
        self._checkpoints = checkpoints
        self.announcements = announcements
        self._receiver = receiver
        self._pool = pool
        self._evaluator = evaluator
        self._reporter = reporter
        self._memory_plans = memory_plans
        self._writes = DeviceWriteBuffer(journal.direct)
        self._sums: Accumulator | None = None
        self._release_at = 0.0
        self._last_devices: frozenset[str] = frozenset()
        """Devices of the last round that this process opened."""
        self._versions: dict[int, ModelVersion] = {}
        """Models that rounds begin from, by number: as many rounds as devices may still work for."""
        self.model = self._resume_model() if context.resumed else self._begin_run()
        self._best = self._best_so_far()
        self.state = coordinator.initial(self.model.version, self._clock())
        self.aggregation: RoundAggregation | None = None
        self.refusal_error: EdgeflError | None = None

    # -- begin and resumption --------------------------------------------------------------------------------

    def _begin_run(self) -> ModelVersion:
        """Save and publish the initial model, journal the new run, and return the model.

        The journal comes last, because a run that cannot be published must not be resumed.
        """
        self._checkpoints.save(0, self._spec.initial)
        model = self._load_model(0)
        self.announcements.publish(model)
        self._versions = {1: model}
        self._journal.direct.begin_run(self._run)
        return model

    def _resume_model(self) -> ModelVersion:
        number = self._run.number
        for earlier in range(max(1, number - self._spec.rules.max_staleness), number):
            self._versions[earlier] = self._load_model(earlier - 1)
            self.announcements.publish(self._versions[earlier])
        model = self._versions[number] = self._load_model(number - 1)
        self.announcements.resume(model)
        return model

    def _load_model(self, number: int) -> ModelVersion:
        return ModelVersion.of(self._spec, number, self._checkpoints.load(number))

    def journaled_state(self, *, held: bool) -> State:
        """Return the coordinator's state from the journal, and clear blobs of earlier rounds at the broker.

        The deadline of an open round is computed from the present, because no device could report meanwhile.

        Args:
            held: True if no round may open before an operator permits it.

        Raises:
            StoreError: If the journal cannot be read, or the checkpoint is not the model that the open round began
                from.
        """
        journal, run, rules = self._journal.direct, self._spec.rules.run, self._spec.rules
        progress, deadline = journal.progress(run), self._clock() + rules.deadline_s
        known = journal.devices()
        state = replace(
            coordinator.initial(self.model.version, self._clock()),
            next_round=self._run.number,
            devices=Devices(
                {
                    name: replace(each, unfit=unfit(rules.selection, each.conditions))
                    for name, each in known.items()
                }
            ),
            record=journal.record(run),
            trial=journal.trial(run),
            position=progress.position,
            base=progress.base,
            members=progress.members,
            held=held,
        )
        opened = journal.current_round(run)
        if opened is not None:
            if opened.model_version != self.model.version:
                raise StoreError(
                    f"round {opened.number} began from model {opened.model_version[:12]}, its checkpoint holds "
                    f"{self.model.version[:12]}: restore the file, or start over in another folder"
                )
            opened = replace(opened, deadline=deadline)
            if opened.buffered:
                opened = replace(opened, assignments=opened.assignments.later(deadline))
            state = replace(state, phase="open", round=opened)
        elif rules.buffered:
            tasks = Assignments(journal.open_tasks(run))
            state = replace(state, carried=tasks.later(deadline), versions=journal.versions(run))
        # A killed process may have left the blobs of earlier rounds at the broker.
        for units in journal.published_units(run):
            self.announcements.clear(msgspec.msgpack.decode(units, type=_Published))
        return state

    def resume(self, state: State) -> None:
        """Continue from ``state``. If it has an open round, its journaled updates are added to new sums.

        Workers add the updates of their own shards.
        """
        self.state = state
        if (opened := state.round) is None:
            return
        self._journal.direct.take_again(self._spec.rules.run)
        self.aggregation = self._begin_aggregation(opened)
        self._receiver.replay(self.aggregation, {NO_SHARD} if self._pool.has_workers else None)
        self._pool.begin(opened, self.aggregation)

    # -- events ----------------------------------------------------------------------------------------------

    def flush(self) -> ReceiveResult:
        """Journal the buffered updates and add them to the sums, retried until the storage accepts them.

        Return their replies and answers; empty if there are none, or if the server is stopping and cannot write.
        """
        aggregation = self.aggregation
        if aggregation is None or not self._receiver.has_batch:
            return ReceiveResult()
        try:
            return self._policy.run(lambda: self._receiver.flush(aggregation))
        except StoreError:  # the server stops; nothing was acknowledged, so the devices send again
            return ReceiveResult()

    def dispatch(self, event: states.Event, *, settle: bool = True) -> None:
        """Pass an event to the coordinator, and perform the actions that follow.

        Call :meth:`flush` before any event that may close the round, so that earlier updates count.

        Args:
            event: Event of a device, a worker, an operator or the timer.
            settle: False to store the event only; a later one decides whether a round opens or closes.

        Raises:
            ActionFailed: If an action cannot be written while the server stops. A restarted server continues the
                round.
        """
        if (
            waited := self._policy.take_waited()
        ):  # no device could be answered, so no deadline may have passed
            self._step(states.Outage(waited), settle=True)
        self._step(event, settle=settle)

    def _step(self, event: states.Event, *, settle: bool) -> None:
        before = self.state
        rules = self._memory_plans.apply(self._spec.rules)
        self.state, actions = coordinator.step(rules, before, event, self._clock(), settle=settle)
        if isinstance(event, states.DeviceHello | states.DeviceStatus):
            hello = event.message if isinstance(event, states.DeviceHello) else None
            self._writes.take(before, self.state, event.device, hello)
            self._reporter.report_change(before, self.state, event.device)
        if isinstance(event, states.TaskDeclined):
            self._pool.decline(event.device)
        try:
            perform(actions, self)
        except StoreError as error:
            raise ActionFailed(error.message, **error.details) from error
        if isinstance(event, states.DeviceHello):
            self._reporter.report_newcomer(self.state, event.device)
        if settle:
            current = self.announcements.publisher.current
            if self.state.phase == "waiting" and current is not None and current.state == "open":
                self.announce()
            self._reporter.report_waiting(self.state)

    def write_devices(self, *, quiet: bool) -> None:
        """Journal the devices that changed: at once if ``quiet`` is True (no message waits), otherwise a second after
        the first change.

        A storage error is reported, and the devices are written later.
        """
        try:
            self._writes.write(quiet=quiet)
        except StoreError as error:
            self._reporter.report_storage_error(error)

    def write_devices_in(self) -> float | None:
        """Return the seconds until :meth:`write_devices` should be called; None if no device changed."""
        return self._writes.wait()

    # -- actions of the coordinator --------------------------------------------------------------------------

    def open_round(self, opened: OpenRound) -> None:
        """Journal a round, publish its announcement, and send its tasks. Updates are added to :attr:`aggregation` from
        then on.
        """
        self._policy.run(lambda: self._writes.write(quiet=True))
        published = msgspec.msgpack.encode(self.announcements.published)
        trial = self.state.trial
        known: dict[str, Any] = {ROLLOUT: msgspec.to_builtins(trial)} if trial is not None else {}
        if opened.evaluates:
            known[EVALUATES] = -opened.position
        self._journal.open_round(self._spec.rules.run, opened, published, known)
        self.aggregation = self._begin_aggregation(opened)
        self._last_devices = frozenset(opened.assignments)
        self.announce()
        self._pool.begin(opened, self.aggregation)
        self._send_tasks(opened.began)
        self._reporter.report_opened(opened, trial)

    def send_task(self, assignment: Assignment) -> None:
        """Send a device its task, if the receiver of its update (a worker or the server) is ready.

        If it is not ready, the task is sent when the worker reports that it is.
        """
        opened, device = self.state.round, assignment.device
        if opened is not None and self._pool.receives(device, opened.number):
            by_turns = self.aggregation is not None and self.aggregation.by_turns
            shard = shard_of(device) if self._pool.has_workers else NO_SHARD
            self.announcements.send_task(opened, assignment, ask=by_turns, shard=shard)

    def reassign(self, over: tuple[Assignment, ...], tasks: tuple[Assignment, ...]) -> None:
        """Journal that the tasks ``over`` have ended, drop their unfinished updates, and send the new ``tasks``."""
        self._journal.reassign(self._spec.rules.run, over, tasks)
        self._receiver.cancel(task.device for task in over)
        self._send_tasks(tasks)

    def close_round(self, ended: OpenRound) -> None:
        """Compute, save and publish the new model, journal the end of the round, and report the model to the
        coordinator.
        """
        result = self._end_round(ended, "closed")
        self.dispatch(states.ModelReady(self.model.version, result.failed, result.undone))

    def abandon_round(self, ended: OpenRound, text: str, *, restart: bool) -> None:
        """End a round without a new model, and journal that. ``text`` is the reason, for people.

        ``restart``: the algorithm begins again with the next round.
        """
        if restart:
            self._journal.begin_again(self._spec.rules.run, ended.number)
        self._end_round(ended, "abandoned", text)

    def finish(self) -> None:
        """Announce the end of the run.

        Online devices without a task in the last round get a message, which makes them read the announcement.
        """
        self.announce()
        number = max(1, self.state.next_round - 1)
        for device in self.state.devices.values():
            if device.online and device.tier and device.name not in self._last_devices:
                self.announcements.call(number, device.name, device.tier)

    def refuse(self, error: EdgeflError) -> None:
        """End the run early because of ``error``, which :attr:`refusal_error` then holds.

        The end is announced to the devices. Another process may resume the run.
        """
        self.refusal_error = error
        self._reporter.emit(events.Refused(text=error.message))
        self.finish()

    def warn(self, text: str) -> None:
        """Emit a warning about the run, for people."""
        self._reporter.emit(events.Warned(tier="", text=text))

    def announce(self) -> None:
        """Publish the announcement of the run's state, retried until the storage accepts it."""
        self._policy.run(lambda: self.announcements.announce(self.state, self.model.version))

    def send_open_tasks(self) -> None:
        """Send all open tasks of the current round again to their devices."""
        if self.state.round is not None:
            self._send_tasks(self.state.round.with_status("open"))

    def _send_tasks(self, tasks: tuple[Assignment, ...]) -> None:
        for task in tasks:
            self.send_task(task)

    def _begin_aggregation(self, opened: OpenRound) -> RoundAggregation:
        return begin_aggregation(
            self._spec,
            opened,
            self._round_model(self.model),
            device=self._device,
            sums=self._sums,
            sent_bytes=self.announcements.sent_bytes,
            older={number: self._round_model(self._versions[number]) for number in opened.older},
        )

    def _round_model(self, model: ModelVersion) -> RoundModel:
        return RoundModel(model, self.announcements)

    def _end_round(self, ended: OpenRound, outcome: states.Outcome, text: str = "") -> RoundConclusion:
        """End the round: collect its sums, compute and save the model, journal the end, and return the conclusion.

        After a kill before the journal's entry, the next process repeats the end from the journaled updates. After a
        kill behind it, the next process continues with the next round, whose checkpoint is on disk.
        """
        run, rules = self._spec.rules.run, self._spec.rules
        aggregation, self.aggregation = self.aggregation, None
        assert aggregation is not None, "the coordinator ends rounds that it has opened"

        # No update is accepted from here on. Workers return their sums; the journal knows all answers.
        ended = self._pool.end_round(ended, aggregation, summed=outcome == "closed")
        self._policy.run(lambda: self._receiver.end_round(ended))
        now = self._clock()

        # The model after the round: of its updates, or the old one.
        result = RoundConclusion(self.model.weights)
        devices = self._method_devices()
        if outcome == "closed":
            start = self._round_model(self.model)
            result = conclude_round(self._spec, ended, aggregation, start, devices=devices, best=self._best)
        if result.failed:
            outcome, text = "abandoned", result.failed

        # The checkpoint and its blobs come before the journal's entry, which a resumed run starts from.
        digest = self._policy.run(lambda: self._checkpoints.save(ended.number, result.weights))
        self.model = self._policy.run(lambda: self._load_model(ended.number))
        self._policy.run(lambda: self.announcements.publish(self.model))
        oldest = ended.number + 1 - rules.max_staleness
        self._versions = {number: model for number, model in self._versions.items() if number >= oldest}
        self._versions[ended.number + 1] = self.model

        # The journal's entry.
        record, tally = self.state.record, self._journal.tally(run, ended.number)
        facts: dict[str, Any] = {
            **vars(tally),
            "tiers": msgspec.to_builtins(tally.tiers),
            "seconds": self._clock() - ended.opened,
            "weights_sha256": digest,
            "server_down_bytes": self.announcements.sent_bytes - aggregation.sent_bytes,
            "text": text,
            "devices": devices,
            TURNOUT: msgspec.to_builtins(record.turnout(ended.number)),
            "fairness": record.fairness(self.state.devices.members),
        }
        if ended.evaluates:
            facts[EVALUATES] = -ended.position
            if outcome == "closed" and ended.measures:
                facts["measures"] = True
            elif outcome == "closed":
                facts |= self._reported(ended, aggregation)
        trial = None if ended.evaluates else self._count_trial(ended.number)
        if self.state.trial is not None:
            facts[ROLLOUT] = msgspec.to_builtins(trial or self.state.trial)
        if result.metrics is not None and not result.undone:  # the model is evaluated, and need not be again
            facts |= metric_fields(result.metrics)
            self._best = self._best.after(result.metrics)
        took_part = record.of_round(ended.number, ended.assignments)
        self._journal.end_round(run, ended.number, state=outcome, outcome=facts, took_part=took_part)
        self._prune_checkpoints(ended.number)
        self._sums = aggregation.aggregator.release_sums()
        self._release_at = time.monotonic() + _RELEASE_S

        # Reports, and the evaluation beside the next round.
        self._reporter.report_ended(self.state, ended, outcome, result.failed or text, now)
        if trial is not None:
            self.dispatch(states.TrialCounted(trial))
            self._reporter.report_trial(ended.number, trial)
        if result.undone:
            metrics = metric_fields(result.metrics or {})
            self._reporter.emit(events.RolledBack(round=ended.number, text=result.failed, **metrics))
        self._evaluator.submit(ended.number, outcome, None if result.undone else result.metrics)
        return result

    def _reported(self, ended: OpenRound, aggregation: RoundAggregation) -> dict[str, Any]:
        """Return the result of an evaluation or statistics round, by the name of its field in :class:`RoundClosed`."""
        if self._spec.statistics is None:
            found = evaluate_reports(self._spec, ended.number, aggregation, self.model.weights)
            return {"evaluation": msgspec.to_builtins(found)}
        names = [each.device for each in ended.with_status("accepted")]
        announced = sum(self.state.devices[name].samples for name in names if name in self.state.devices)
        return {"statistics": msgspec.to_builtins(sum_up_reports(self._spec, aggregation, announced))}

    def _count_trial(self, number: int) -> Trial | None:
        """Return the trial of a candidate bundle with the figures of round ``number`` added; None if no trial is in
        progress.
        """
        rollout, trial = self._spec.rules.rollout, self.state.trial
        if rollout is None or trial is None or trial.verdict:
            return None
        reports = self._journal.reports(self._spec.rules.run, number)
        return count_round(rollout, trial, self.state.record.turnout(number), reports)

    def _method_devices(self) -> int:
        """Return the number of devices that the algorithm assumes to take part.

        It is the number of its members if it needs all devices, else that of all devices with a tier.
        """
        if self._spec.rules.all_needed:
            return len(self._journal.progress(self._spec.rules.run).members)
        return self._journal.count_devices()

    def _prune_checkpoints(self, number: int) -> None:
        """Delete old checkpoints up to round ``number`` that neither devices nor evaluations need.

        A run that keeps its updates keeps the initial model, too.
        """
        keep = {*self._evaluator.pending, *(each - 1 for each in self._versions)}
        self._checkpoints.prune(number, keep | {0} if self._spec.keep_updates else keep)

    def _best_so_far(self) -> BestMetrics:
        """Return the best metrics of all rounds that were closed so far. They are empty (None) if the run has no
        rollback rule.
        """
        outcomes = self._journal.direct.outcomes(self._spec.rules.run) if self._spec.rollback.on else []
        closed = [details for _, outcome, details in outcomes if outcome == "closed"]
        return best_of({name: details.get(name) for name in ("accuracy", "loss")} for details in closed)

    # -- requests of the service and of operators ------------------------------------------------------------

    def rollback_refusal(self, number: int) -> str:
        """Return the reason why the model after round ``number`` cannot be restored; empty if it can."""
        rules, last = self._spec.rules, self.state.next_round - 1
        if rules.whole:
            return "the algorithm needs every device in every round, and what devices keep belongs to the rounds since"
        if rules.buffered:
            return "devices are at work on the versions since, and what they send is a change of these"
        if not 0 <= number < last:
            return f"the model is that after round {last}; name an earlier one"
        if not self._checkpoints.path(number).exists():
            return f"the model after round {number} is not kept any more: name one of checkpoints/"
        return ""

    def roll_back(self, number: int) -> None:
        """Restore the model after round ``number``, between two rounds.

        The rounds since then count as abandoned, which invalidates the state that devices stored in them. If the
        process is killed, a repetition has the same result.

        Raises:
            StoreError: If the checkpoint cannot be read.
        """
        run, last = self._spec.rules.run, self.state.next_round - 1
        weights = self._checkpoints.load(number)
        text = f"undone: an operator took the model back to round {number}"
        digest = self._policy.run(lambda: self._checkpoints.save(last, weights))
        self._journal.undo(run, number, text, digest)
        self.model = self._policy.run(lambda: self._load_model(last))
        self._policy.run(lambda: self.announcements.publish(self.model))
        self._best = self._best_so_far()
        progress = self._journal.direct.progress(run)
        self.state = replace(
            self.state, model_version=self.model.version, position=progress.position, base=progress.base
        )

    def write_model(self) -> events.Finished:
        """Write the trained model, if there is one, and delete old checkpoints. Call it after the last round.

        Returns:
            The event of the end of the run.
        """
        weights, rules = self._spec.model_of(self.model.weights), self._spec.rules
        if not rules.rounds:
            return events.Finished(
                rounds=rules.last_round, model="", weights_sha256="", accuracy=None, loss=None
            )
        digest = self._policy.run(lambda: self._checkpoints.finish(weights))
        self._checkpoints.prune(rules.last_round)
        _, details = self._journal.outcome(rules.run, rules.last_training)
        fields: Mapping[str, Any] = {
            "accuracy": details.get("accuracy"),
            "loss": details.get("loss"),
            "metrics": details.get("metrics", {}),
        }
        return events.Finished(
            rounds=rules.last_round,
            model=str(self._checkpoints.model),
            weights_sha256=digest,
            text=self._spec.caveat,
            metric=self._spec.metric,
            **fields,
        )

    def release_memory(self, *, quiet: bool) -> None:
        """Return freed memory to the system if ``quiet`` is True (no message waits) and two seconds have passed since
        a round's end.
        """
        if quiet and self._release_at and time.monotonic() >= self._release_at:
            self._release_at = 0.0
            release_freed()
