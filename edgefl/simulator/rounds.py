"""The rounds of a simulated federation: the coordinator decides, the aggregator sums, and clients train in between.

No clock: time is the federation's own, in seconds since it began (:mod:`edgefl.simulator.fleet`).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from edgefl.errors import ParticipationError
from edgefl.simulator.carries import Carries
from edgefl.simulator.clients import ClientData
from edgefl.simulator.downlink import Downloads, Fetched
from edgefl.simulator.fleet import Fleet, Work
from edgefl.simulator.functions import Functions
from edgefl.simulator.row import Row
from edgefl.simulator.standing import Ended, Standing, Tally
from edgefl.simulator.trainers.tasks import Portion, Report, RoundTask, Trainers
from edgefl.simulator.versions import Versions
from edgefl.wire import tensors
from edgefl.wire.mqtt.messages import NO_CARRY
from edgefl.wire.tensors import Arrays
from edgefl_device.store.carry_choice import RoundToBegin
from edgefl_server.active_round import Began, Conclusion, active_round, concluded, measured
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.coordinator import attendance, states
from edgefl_server.coordinator import machine as coordinator
from edgefl_server.coordinator.collapse import Best
from edgefl_server.coordinator.fleet import Assignment, Assignments, Devices
from edgefl_server.coordinator.record import Record
from edgefl_server.coordinator.roster import Device, tier_of
from edgefl_server.coordinator.states import Actions, OpenRound, State
from edgefl_server.publish.model import Model
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.run_spec import RunSpec

RUN = "simulation"


@dataclass
class Rounds:
    """Simulates ``spec``, whose clients ``trainers`` train. ``update_bytes``: what an update takes, by tier;
    ``together``: clients of a tier that a trainer takes at a time; 0: as many as suit its functions."""

    spec: RunSpec
    functions: Mapping[tuple[str, int], Functions]
    data: ClientData
    downloads: Downloads
    carries: Carries
    trainers: Trainers
    _: KW_ONLY
    fleet: Fleet
    update_bytes: Mapping[str, int]
    together: int = 1
    device: str = "auto"
    warn: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self._rules = replace(self.spec.rules, run=RUN)
        self._sums: Accumulator | None = None
        self._now = 0.0
        self._best = Best()
        known = self.spec, self._rules, self.functions, self.data, self.downloads
        self._versions = Versions(*known, self.fleet, self.update_bytes)

    def run(self, weights: Arrays, standing: Standing, *, resumed: bool = False) -> Iterator[Ended]:
        """Every round that is left. ParticipationError where the algorithm needs clients that the run has not."""
        self._now, self._best = standing.now, standing.best
        model = Model.of(self.spec, standing.number, weights)
        (self.downloads.resume if resumed else self.downloads.publish)(model)
        state = replace(
            coordinator.initial(model.version, self._now),
            next_round=standing.number + 1,
            devices=self._devices(),
            position=standing.position,
            base=standing.base,
            members=standing.members,
            refused=standing.refused,
            record=Record.read(standing.took_part, standing.turnouts),
        )
        state, actions = coordinator.step(self._rules, state, states.Tick(), self._now)
        if not actions:
            state, actions = self._waited(state)
        if not actions:
            needed = attendance.presence(self._rules, state, self._now).needed
            raise ParticipationError(
                f"round {state.next_round} cannot open: it needs {needed} clients, and the tiers have "
                f"{len(state.devices)}; lower round.min_reports, or raise the count of a tier",
                needed=needed,
            )
        pending, active, tally = deque(actions), None, Tally(time.perf_counter(), {})
        while pending:
            match pending.popleft():
                case states.Open(round=opened) if self._rules.buffered:
                    tally = Tally(time.perf_counter(), {})
                    state, more, active = self._collect(state, opened, model, tally)
                    pending.extend(more)
                case states.Open(round=opened):
                    received = self.downloads.received(model) if measured(self.spec) else {}
                    tally, active = Tally(time.perf_counter(), {}), self._active(opened, model, received)
                    state, more = self._report(state, opened, active, model, received, tally)
                    pending.extend(more)
                case states.Close(round=opened) if active is not None:
                    done = self._concluded(opened, active, model, state)
                    if done.undone:
                        self.warn(done.failed)
                    outcome: states.Outcome = "abandoned" if done.failed else "closed"
                    model, row = self._end(opened, active, done, tally, state, outcome, done.failed)
                    ready = states.ModelReady(model.version, done.failed, done.undone)
                    state, more = coordinator.step(self._rules, state, ready, self._now)
                    yield Ended(row, model.weights, self._standing(opened.number, state))
                    pending.extend(more)
                case states.Abandon(round=opened, text=text) if active is not None:
                    model, row = self._end(
                        opened, active, Conclusion(model.weights), tally, state, "abandoned", text
                    )
                    yield Ended(row, model.weights, self._standing(opened.number, state))
                case states.Warn(text=text):
                    self.warn(text)
                case states.Refuse() as refuse:
                    raise refuse.error
                case states.Finish():
                    return
            if not pending and state.phase == "waiting":
                state, more = self._waited(state)
                pending.extend(more)

    def _waited(self, state: State) -> tuple[State, Actions]:
        """No round opens by itself: what follows once the coordinator's patience is over."""
        if (later := coordinator.wake_at(self._rules, state, self._now)) is None:
            return state, ()
        self._now = later
        return coordinator.step(self._rules, state, states.Tick(), later)

    # -- clients ---------------------------------------------------------------------------------------------

    def _devices(self) -> Devices:
        return Devices(
            {
                name: Device(name, tier_of(self._rules.tiers, name, memory), samples, True, 0.0)
                for name, (samples, memory) in self._clients().items()
                if not self.fleet.absent(name)
            }
        )

    def _clients(self) -> dict[str, tuple[int, int]]:
        """Samples and memory of each client: one of a tier that goes by memory reports just this much."""
        needs = {tier.name: tier.memory_bytes for tier in self._rules.tiers}
        return {name: (count, needs[name.rpartition("-")[0]]) for name, count in self.data.samples.items()}

    def _report(
        self,
        state: State,
        opened: OpenRound,
        active: RoundAggregation,
        model: Model,
        received: Arrays,
        tally: Tally,
    ) -> tuple[State, Actions]:
        """Train as many clients as the round wants, in the order in which they would report."""
        index = self.spec.index(opened.position)
        hyper = self.spec.hyper_at(opened.number, opened.position)
        tiers = {each.tier for each in opened.assignments.values()}
        fetched = {tier: self.downloads.fetch(self.functions[tier, index].manifest) for tier in tiers}
        weights = {tier: own.weights for tier, own in fetched.items()}
        self.trainers.begin(RoundTask(opened, model, weights, hyper, received), active)
        tally.work |= self._work(opened, fetched)
        waiting = deque(self._arrivals(opened, tally.work))
        actions: Actions = ()
        while waiting and not actions and state.round is not None:
            lacking = state.round.goal - len(state.round.with_status("accepted"))
            arrived = [waiting.popleft() for _ in range(min(max(1, lacking), len(waiting)))]
            self._now, wanted = opened.opened + arrived[-1][0], [each for _, each in arrived]
            portions = self._portions(wanted, opened, state.base)
            answers: dict[str, states.Answered | states.Declined] = {
                each.device: states.Declined(each.device, each.nonce, NO_CARRY) for each in wanted
            }
            for report in self.trainers.train(portions, self.carries.read):
                tally.down_bytes += fetched[opened.assignments[report.client].tier].nbytes
                answers[report.client] = self._take(report, opened, state.base, tally)
            state, actions = _answered(self._rules, state, list(answers.values()), self._now)
        if not actions:
            self._now = opened.deadline
            state, actions = coordinator.step(self._rules, state, states.Tick(), self._now)
        return state, actions

    def _collect(
        self, state: State, opened: OpenRound, model: Model, tally: Tally
    ) -> tuple[State, Actions, RoundAggregation]:
        """Train those whose updates a version takes that waits for nobody."""
        versions = self._versions
        window, reports, active = versions.collect(
            state,
            opened,
            model,
            self._now,
            active=lambda older: self._active(opened, model, versions.received(opened.number), older),
            train=self._train,
        )
        self._now, tally.energy_j = window.now, window.energy_j
        tally.staleness = [opened.number - task.round for task in window.taken]
        for task in window.taken:
            tally.down_bytes += versions.fetched(task).nbytes
            own = replace(opened, assignments=Assignments({task.device: task}))
            self._take(reports[task.nonce], own, opened.number, tally)
        return window.state, window.actions, active

    def _train(self, task: RoundTask, active: RoundAggregation) -> Iterator[Report]:
        self.trainers.begin(task, active)
        wanted = list(task.opened.assignments.values())
        portions = self._portions(wanted, task.opened, task.opened.number)
        return self.trainers.train(portions, self.carries.read)

    def _work(self, opened: OpenRound, fetched: Mapping[str, Fetched]) -> dict[str, Work]:
        """What each selected client has to do."""
        index, samples, most = self.spec.index(opened.position), self.data.samples, self._rules.samples
        work = {}
        for each in opened.assignments.values():
            steps = self.functions[each.tier, index].steps(samples[each.device], most)
            sizes = fetched[each.tier].nbytes, self.update_bytes[each.tier]
            work[each.device] = Work(each.tier, steps, *sizes)
        return work

    def _arrivals(self, opened: OpenRound, work: Mapping[str, Work]) -> list[tuple[float, Assignment]]:
        """Who reports before the deadline, and when, in seconds since the round began: the first one first."""
        fleet, arriving = self.fleet, []
        for each in opened.assignments.values():
            took = fleet.seconds(each.device, work[each.device])
            if took < self._rules.deadline_s and not fleet.vanishes(opened.number, each.tier, each.device):
                arriving.append((took, each))
        return sorted(arriving, key=lambda one: (one[0], fleet.place(opened.number, one[1].device)))

    def _portions(self, wanted: Sequence[Assignment], opened: OpenRound, base: int) -> list[Portion]:
        """All of ``wanted``, but for those that lack what they should have kept. How they are cut does not depend on who
        trains them: a group that is filled up differently has other bits."""
        portions = []
        for tier in dict.fromkeys(each.tier for each in wanted):
            manifest = self.functions[tier, self.spec.index(opened.position)].manifest
            reads = any(graph.inputs_of("carry") for graph in manifest.of_round)
            own = [each for each in wanted if each.tier == tier]
            size = self.together or self.functions[tier, self.spec.index(opened.position)].together
            for first in range(0, len(own), size):
                some, kept = own[first : first + size], {}
                for each in some if reads else ():
                    begun = self._begun(each, opened, base)
                    if (
                        number := self.carries.choose(each.device, begun, manifest.carry_exchanges)
                    ) is not None:
                        kept[each.device] = number
                needed = reads and manifest.carry_needed
                taking = tuple(each.device for each in some if not needed or each.device in kept)
                portions.append(Portion(tier, taking, kept))
        return [each for each in portions if each.clients]

    def _begun(self, assignment: Assignment, opened: OpenRound, base: int) -> RoundToBegin:
        algorithm = self.functions[assignment.tier, self.spec.index(opened.position)].manifest.program
        return RoundToBegin(RUN, f"{RUN}/{algorithm}/{assignment.tier}", opened.number, base)

    def _take(self, report: Report, opened: OpenRound, base: int, tally: Tally) -> states.Answered:
        """Write down what a client reported, and what it keeps."""
        if report.refused:
            return states.Answered(report.client, accepted=False, reason=report.refused)
        tally.up_bytes += report.up_bytes
        tally.up_float32_bytes += report.up_float32_bytes
        if math.isfinite(report.loss):
            tally.losses[report.client] = report.loss
        if report.carry:
            task = opened.assignments[report.client]
            self.carries.keep(report.client, self._begun(task, opened, base), task.nonce, report.carry)
        return states.Answered(report.client, accepted=True)

    # -- models ----------------------------------------------------------------------------------------------

    def _active(
        self,
        opened: OpenRound,
        model: Model,
        received: Arrays,
        older: Mapping[int, Began] | None = None,
    ) -> RoundAggregation:
        return active_round(
            self.spec,
            opened,
            model,
            received=lambda: received,
            device=self.device,
            sums=self._sums,
            sent_bytes=0,
            older=older,
        )

    def _concluded(
        self, ended: OpenRound, active: RoundAggregation, model: Model, state: State
    ) -> Conclusion:
        members = len(state.members) if self._rules.all_needed else len(state.devices)
        received = self.downloads.received
        return concluded(
            self.spec,
            ended,
            active,
            model,
            received=lambda: received(model),
            devices=members,
            best=self._best,
        )

    def _end(
        self,
        ended: OpenRound,
        active: RoundAggregation,
        done: Conclusion,
        tally: Tally,
        state: State,
        outcome: states.Outcome,
        text: str,
    ) -> tuple[Model, Row]:
        weights = done.weights
        self._sums = active.aggregator.released()
        model = Model.of(self.spec, ended.number, weights)
        self.downloads.publish(model)
        metrics: dict[str, float] = {}
        if self.spec.evaluate is not None and self.spec.evaluates(ended.number, outcome):
            judged = None if done.undone else done.metrics
            found = self.spec.evaluate(self.spec.model_of(weights)) if judged is None else judged
            self._best = self._best.after(found) if outcome == "closed" else self._best
            metrics = {name: value for name, value in found.items() if math.isfinite(value)}
        loss = metrics.pop("loss", None)
        losses = [tally.losses[name] for name in sorted(tally.losses)]
        row = Row(
            round=ended.number,
            outcome=outcome,
            accuracy=metrics.get("accuracy"),
            loss=loss,
            train_loss=sum(losses) / len(losses) if losses else None,
            selected=len(ended.assignments),
            reports=ended.count("accepted"),
            rejected=ended.count("rejected"),
            declined=ended.count("declined"),
            down_bytes=tally.down_bytes,
            up_bytes=tally.up_bytes,
            up_float32_bytes=tally.up_float32_bytes,
            seconds=time.perf_counter() - tally.began,
            simulated_s=self._now - ended.opened,
            energy_j=self._energy(ended, tally) if tally.energy_j is None else tally.energy_j,
            staleness=sum(tally.staleness) / max(1, len(tally.staleness)),
            weights_sha256=hashlib.sha256(tensors.dump(weights)).hexdigest(),
            text=text,
            metric=self.spec.metric,
            metrics=metrics,
            fairness=state.record.fairness(state.devices.members),
        )
        return model, row

    def _energy(self, ended: OpenRound, tally: Tally) -> float:
        """Joules of all selected clients but those that declined, which did nothing."""
        declined = {each.device for each in ended.with_status("declined")}
        took = self._now - ended.opened
        return math.fsum(
            self.fleet.joules(ended.number, client, work, took)
            for client, work in tally.work.items()
            if client not in declined
        )

    def _standing(self, number: int, state: State) -> Standing:
        return Standing(
            number=number,
            position=state.position,
            base=state.base,
            members=state.members,
            refused=state.refused,
            now=self._now,
            best=self._best,
            took_part=dict(state.record.of),
            turnouts=tuple(map(dict, state.record.turnouts)),
        )


def _answered(
    rules: states.Rules, state: State, answers: Sequence[states.Answered | states.Declined], now: float
) -> tuple[State, Actions]:
    """The state after all ``answers``, of which only the last can end the round: the coordinator looks at them once."""
    if state.round is None or not answers:
        return state, ()
    return coordinator.step(rules, state, states.Answers(tuple(answers)), now)
