"""Carries out what the coordinator decides: begins, opens and ends the rounds of a run, and keeps its model."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import msgspec

from edgefl.errors import ConfigError, StoreError
from edgefl.system.clock import steady_time
from edgefl.system.given_back import give_back
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.archive import Signer
from edgefl.wire.mqtt.envelope import Seal
from edgefl.wire.mqtt.session import Session
from edgefl_server.active_round import Began, Conclusion, active_round, concluded
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.coordinator import machine as coordinator
from edgefl_server.coordinator import states
from edgefl_server.coordinator.collapse import Best, best_of
from edgefl_server.coordinator.eligibility import unfit
from edgefl_server.coordinator.fleet import Assignments, Devices
from edgefl_server.coordinator.rollout import Trial, counted
from edgefl_server.coordinator.states import OpenRound, Reassign, State
from edgefl_server.events import Finished
from edgefl_server.patience import Persist, once
from edgefl_server.publish.announcements import Announcements
from edgefl_server.publish.downlink import check_counting
from edgefl_server.publish.model import Model
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.run_spec import RunSpec
from edgefl_server.scoring import last_words, told_of
from edgefl_server.storage.checkpoints import Checkpoints
from edgefl_server.storage.journal import Journal, Run
from edgefl_server.storage.participation_rows import TURNOUT
from edgefl_server.storage.trial_rows import ROLLOUT

_TIDY_S = 2.0
_COMPILER = "libllvmlite"
"""What loads the loops that updates are added by, and then has nothing to do."""

_Published = list[BlobRef]


class AnotherConfiguration(ConfigError):
    """A folder whose run was begun with other settings, or with other code, than it is to go on with."""


def check_configuration(run: Run, federation: str, digest: str) -> None:
    """Raise AnotherConfiguration if a run of ``federation`` was begun under another digest."""
    if run.digest != digest:
        raise AnotherConfiguration(
            f"the journal holds run {run.run} of federation {federation!r} under another configuration; restore that "
            "configuration or choose another `out`",
            run=run.run,
        )


@dataclass(frozen=True)
class EndedRound:
    """How a round ended: the model after it, and why that is the old one, if it ``failed``.

    ``metrics``: of the model that the updates gave, if it has been judged; ``undone``: it is not the one that stays.
    ``trial``: that of a candidate with this round; None where there is none under way.
    """

    model_version: str
    outcome: states.Outcome
    failed: str = ""
    metrics: Mapping[str, float] | None = None
    undone: bool = False
    trial: Trial | None = None

    @property
    def known(self) -> Mapping[str, float] | None:
        """The metrics of the model that stays, so that it need not be judged again."""
        return None if self.undone else self.metrics


@dataclass(eq=False)
class Rounds:
    """The current model of a run, from round to round. Takes up the run that the journal has.

    AnotherConfiguration if the journal's run has one.
    """

    spec: RunSpec
    journal: Journal
    checkpoints: Checkpoints
    session: Session
    _: KW_ONLY
    device: str = "auto"
    signer: Signer
    seal: Seal
    clock: Callable[[], float] = steady_time
    persist: Persist = once

    def __post_init__(self) -> None:
        self._sums: Accumulator | None = None
        self._littered = 0.0
        self._last: Collection[str] = frozenset()
        """The devices of the last round that this process opened."""
        self._versions: dict[int, Model] = {}
        """The models that the last rounds began from, by their numbers: as many as devices may be at work on."""
        forms = {name: tier.form for name, tier in self.spec.tiers.items()}
        own = [name for name, tier in self.spec.tiers.items() if tier.published not in self.spec.units]
        check_counting(self.spec.count, self.spec.downlink.encoding, forms, own)
        known = self.journal.latest_run()
        self.resumed = known is not None
        self._run = known or Run(uuid.uuid4().hex[:16], self.spec.digest, 1)
        check_configuration(self._run, self.spec.federation, self.spec.digest)
        self.rules = replace(self.spec.rules, run=self._run.run)
        self.announcements = Announcements(
            self.spec,
            self._run.run,
            self.session,
            self.checkpoints.model.parent,
            sign=self.signer.sign,
            seal=self.seal,
        )
        self.model = self._taken_up() if self.resumed else self._begun()
        self.best = self._best()

    # -- beginning and resuming ------------------------------------------------------------------------------

    def _begun(self) -> Model:
        """Journal the run once it has all it needs: what cannot be published must not be taken up by the next start."""
        self.checkpoints.save(0, self.spec.initial)
        model = self._checkpoint(0)
        self.announcements.publish(model)
        self._versions = {1: model}
        self.journal.begin_run(self._run)
        return model

    def _taken_up(self) -> Model:
        for number in range(max(1, self._run.number - self.spec.rules.max_staleness), self._run.number):
            self._versions[number] = self._checkpoint(number - 1)
            self.announcements.publish(self._versions[number])
        model = self._versions[self._run.number] = self._checkpoint(self._run.number - 1)
        self.announcements.resume(model)
        return model

    def _checkpoint(self, number: int) -> Model:
        return Model.of(self.spec, number, self.checkpoints.load(number))

    def initial_state(self, *, held: bool = False) -> State:
        """The coordinator's state as the journal has it. An open round's time starts anew: nobody could report."""
        progress = self.journal.progress(self._run.run)
        state = replace(
            coordinator.initial(self.model.version, self.clock()),
            next_round=self._run.number,
            devices=self._known_devices(),
            record=self.journal.record(self._run.run),
            trial=self.journal.trial(self._run.run),
            position=progress.position,
            base=progress.base,
            members=progress.members,
            held=held,
        )
        opened = self.journal.current_round(self._run.run)
        if opened is not None:
            if opened.model_version != self.model.version:
                raise StoreError(
                    f"round {opened.number} began from model {opened.model_version[:12]}, its checkpoint holds "
                    f"{self.model.version[:12]}: restore the file, or start over in another folder"
                )
            later = replace(opened, deadline=self.clock() + self.rules.deadline_s)
            if opened.buffered:
                tasks = opened.assignments.later(later.deadline)
                later = replace(later, assignments=tasks)
            state = replace(state, phase="open", round=later)
        elif self.rules.buffered:
            tasks = Assignments(self.journal.open_tasks(self._run.run))
            state = replace(
                state,
                carried=tasks.later(self.clock() + self.rules.deadline_s),
                versions=self.journal.versions(self._run.run),
            )
        # What a killed process did not live to clear.
        for units in self.journal.published_units(self._run.run):
            self.announcements.clear(msgspec.msgpack.decode(units, type=_Published))
        return state

    def _known_devices(self) -> Devices:
        rule = self.rules.selection
        known = self.journal.devices()
        return Devices(
            {name: replace(each, unfit=unfit(rule, each.conditions)) for name, each in known.items()}
        )

    # -- rounds ----------------------------------------------------------------------------------------------

    def taking(self, opened: OpenRound) -> RoundAggregation:
        """What is needed to take the updates of a round that begins from the current model."""
        return active_round(
            self.spec,
            opened,
            self.model,
            received=lambda: self.announcements.received(self.model),
            device=self.device,
            sums=self._sums,
            sent_bytes=self.announcements.sent_bytes,
            older={number: self._began(number) for number in opened.older},
        )

    def _began(self, number: int) -> Began:
        model = self._versions[number]
        return Began(model, lambda: self.announcements.received(model))

    def open(self, opened: OpenRound, state: State) -> RoundAggregation:
        """Journal the state's round and announce it."""
        published = msgspec.msgpack.encode(self.announcements.published)
        known = {ROLLOUT: msgspec.to_builtins(state.trial)} if state.trial is not None else {}
        self.persist(lambda: self.journal.open_round(self.rules.run, opened, published, known))
        active = self.taking(opened)
        self._last = frozenset(opened.assignments)
        self.announce(state)
        return active

    def reassign(self, given: Reassign) -> None:
        """Journal that tasks are over, and new ones."""
        self.persist(lambda: self.journal.reassign(self.rules.run, given.over, given.tasks))

    def announce(self, state: State) -> None:
        """Say where the run is."""
        self.persist(lambda: self.announcements.announce(state, self.model.version))

    def announce_end(self, state: State) -> None:
        """The run is over. Devices that took no part in its last round may have stopped listening: they are called."""
        self.announce(state)
        number = max(1, state.next_round - 1)
        for device in state.devices.values():
            if device.online and device.tier and device.name not in self._last:
                self.announcements.call(number, device.name, device.tier)

    def end(
        self,
        ended: OpenRound,
        active: RoundAggregation,
        outcome: states.Outcome,
        text: str = "",
        *,
        state: State,
        keep: Collection[int] = (),
    ) -> EndedRound:
        """Save the round's model (of its updates, or the old one) and journal its end. A round is abandoned whose server
        step fails, or whose model is worse by the rule.

        ``state`` is the coordinator's after its end. Old checkpoints go, except those of the rounds in ``keep``.
        """
        record, done = state.record, Conclusion(self.model.weights)
        devices = self.persist(self._devices)
        if outcome == "closed":
            done = concluded(
                self.spec,
                ended,
                active,
                self.model,
                received=lambda: self.announcements.received(self.model),
                devices=devices,
                best=self.best,
            )
        if done.failed:
            outcome, text = "abandoned", done.failed
        digest = self.persist(lambda: self.checkpoints.save(ended.number, done.weights))
        self.model = self.persist(lambda: self._checkpoint(ended.number))
        self.persist(lambda: self.announcements.publish(self.model))
        oldest = ended.number + 1 - self.rules.max_staleness
        self._versions = {each: model for each, model in self._versions.items() if each >= oldest}
        self._versions[ended.number + 1] = self.model
        facts: dict[str, Any] = {
            **vars(self.persist(lambda: self.journal.tally(self.rules.run, ended.number))),
            "seconds": self.clock() - ended.opened,
            "weights_sha256": digest,
            "server_down_bytes": self.announcements.sent_bytes - active.sent_bytes,
            "text": text,
            "devices": devices,
            TURNOUT: msgspec.to_builtins(record.turnout(ended.number)),
            "fairness": record.fairness(state.devices.members),
        }
        trial = self.persist(lambda: self._tried(state, ended.number))
        if state.trial is not None:
            facts[ROLLOUT] = msgspec.to_builtins(trial or state.trial)
        if done.metrics is not None and not done.undone:  # no second look at what has been judged
            facts |= told_of(done.metrics)
            self.best = self.best.after(done.metrics)
        self.persist(
            lambda: self.journal.end_round(
                self.rules.run,
                ended.number,
                state=outcome,
                outcome=facts,
                took_part=record.of_round(ended.number, ended.assignments),
            )
        )
        self.checkpoints.prune(ended.number, {*keep, *self._kept_models()})
        self._sums = active.aggregator.released()
        self._littered = time.monotonic()
        return EndedRound(self.model.version, outcome, done.failed, done.metrics, done.undone, trial)

    def _tried(self, state: State, number: int) -> Trial | None:
        """The trial with a round more; None if none is under way."""
        rollout, trial = self.rules.rollout, state.trial
        if rollout is None or trial is None or trial.verdict:
            return None
        reports = self.journal.reports(self.rules.run, number)
        return counted(rollout, trial, state.record.turnout(number), reports)

    def refusal(self, state: State, to: int) -> str:
        """Why the model cannot become that after round ``to`` again; empty if it can."""
        if self.rules.whole:
            return "the algorithm needs every device in every round, and what devices keep belongs to the rounds since"
        if self.rules.buffered:
            return "devices are at work on the versions since, and what they send is a change of these"
        if not 0 <= to < state.next_round - 1:
            return f"the model is that after round {state.next_round - 1}; name an earlier one"
        if not self.checkpoints.path(to).exists():
            return f"the model after round {to} is not kept any more: name one of checkpoints/"
        return ""

    def go_back(self, state: State, to: int) -> State:
        """Between rounds: make the model that after round ``to`` again. The rounds since count as abandoned, so that what
        devices keep of them is void. Done again after a kill it comes to the same."""
        run, last = self.rules.run, state.next_round - 1
        weights = self.checkpoints.load(to)
        text = f"undone: an operator took the model back to round {to}"
        digest = self.persist(lambda: self.checkpoints.save(last, weights))
        self.persist(lambda: self.journal.undo(run, to, text, digest))
        self.model = self.persist(lambda: self._checkpoint(last))
        self.persist(lambda: self.announcements.publish(self.model))
        self.best = self._best()
        progress = self.journal.progress(run)
        return replace(
            state, model_version=self.model.version, position=progress.position, base=progress.base
        )

    def _best(self) -> Best:
        """Of the rounds that count so far; nobody asks where there is no rule."""
        told = self.journal.outcomes(self.rules.run) if self.spec.rollback.on else []
        closed = [details for _, outcome, details in told if outcome == "closed"]
        return best_of({name: details.get(name) for name in ("accuracy", "loss")} for details in closed)

    def _kept_models(self) -> Iterator[int]:
        """Those that devices may be at work on, and the first one, from which a run is repeated."""
        yield from (number - 1 for number in self._versions)
        if self.spec.keep_updates:
            yield 0

    def finish(self) -> Finished:
        """All rounds are over: write the model. What is told of it."""
        weights, rounds = self.spec.model_of(self.model.weights), self.rules.rounds
        digest = self.persist(lambda: self.checkpoints.finish(weights))
        self.checkpoints.prune(rounds)
        _, last = self.persist(lambda: self.journal.outcome(self.rules.run, rounds))
        said = last_words(last, self.spec.metric)
        model = str(self.checkpoints.model)
        return Finished(rounds=rounds, model=model, weights_sha256=digest, text=self.spec.caveat, **said)

    def tidy(self, *, quiet: bool) -> None:
        """Some time after a round, once it is quiet, give back the memory that it needed. Not at once: the next one may be
        there in a moment, and would ask for all of it again."""
        if quiet and self._littered and time.monotonic() - self._littered >= _TIDY_S:
            self._littered = 0.0
            give_back(_COMPILER)

    def _devices(self) -> int:
        """How many devices the method is about: its members, or all that were ever seen and have a tier."""
        if self.rules.all_needed:
            return len(self.journal.progress(self.rules.run).members)
        return self.journal.count_devices()
