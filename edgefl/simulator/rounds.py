"""SimulatedRounds of a simulated federation, driven by the server's coordinator and aggregator.

There is no clock: time is the federation's own, in seconds since its begin (:mod:`edgefl.simulator.clients`).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from edgefl.errors import EdgeflError, ParticipationError
from edgefl.simulator.carries import CarryStore
from edgefl.simulator.clients import ClientData, ClientWork, SimulatedFleet
from edgefl.simulator.downlink import FetchedWeights, SimulatedDownlink
from edgefl.simulator.functions import Functions
from edgefl.simulator.results import FinishedRound, RoundRow, RoundTally, SimulationState
from edgefl.simulator.trainers.local_rounds import ClientPortion, Report, RoundTask, Trainers
from edgefl.simulator.versions import ModelVersions
from edgefl.wire import tensors
from edgefl.wire.mqtt.messages import NO_CARRY
from edgefl.wire.tensors import Arrays
from edgefl_device.round.carry import RoundToBegin
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.coordinator import attendance, states
from edgefl_server.coordinator import machine as coordinator
from edgefl_server.coordinator.backend import perform
from edgefl_server.coordinator.collapse import BestMetrics
from edgefl_server.coordinator.fleet import Assignment, Assignments, Devices
from edgefl_server.coordinator.record import ParticipationRecord
from edgefl_server.coordinator.roster import RosterEntry, tier_of
from edgefl_server.coordinator.states import OpenRound, State
from edgefl_server.events import EventListener, Warned
from edgefl_server.hyperparameters import round_hyperparameters
from edgefl_server.publish.model import ModelVersion
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.rounds import (
    FixedDownlink,
    RoundConclusion,
    RoundModel,
    begin_aggregation,
    compares_updates,
    conclude_round,
    evaluate_reports,
)
from edgefl_server.run_spec import RunSpec

RUN = "simulation"


@dataclass
class SimulatedRounds:
    """Round backend of a simulation: performs the coordinator's actions by training clients in its own process or
    workers.

    Attributes:
        spec: Specification of the run.
        functions: Functions of the clients, by tier and index of the exchange (round trip between server and device).
        data: Training data of the clients.
        downloads: Encoder of the model.
        carries: Store of the clients' carries (state between their rounds).
        trainers: Trainers of the clients.
        fleet: Speed and losses of the clients.
        update_bytes: Size of an update, by tier.
        together: Number of clients of a tier that are trained at a time; 0 for as many as suit its functions.
        device: Torch device on which updates are summed.
        listener: Receives warnings.
    """

    spec: RunSpec
    functions: Mapping[tuple[str, int], Functions]
    data: ClientData
    downloads: SimulatedDownlink
    carries: CarryStore
    trainers: Trainers
    _: KW_ONLY
    fleet: SimulatedFleet
    update_bytes: Mapping[str, int]
    together: int = 1
    device: str = "auto"
    listener: EventListener

    def __post_init__(self) -> None:
        self._rules = replace(self.spec.rules, run=RUN)
        self._sums: Accumulator | None = None
        self._now = 0.0
        self._best = BestMetrics()
        known = self.spec, self._rules, self.functions, self.data, self.downloads
        self._versions = ModelVersions(*known, self.fleet, self.update_bytes)
        self._tally = RoundTally(0.0, {})
        self._aggregation: RoundAggregation | None = None
        self._pending: deque[states.Action] = deque()
        self._ended: list[FinishedRound] = []
        self._is_finished = False

    def run(
        self, weights: Arrays, standing: SimulationState, *, resumed: bool = False
    ) -> Iterator[FinishedRound]:
        """Simulate all remaining rounds.

        Args:
            weights: Model to begin with.
            standing: Saved state of an earlier process, or the initial state.
            resumed: True if an earlier process has published the model already.

        Yields:
            Each finished round, closed or abandoned.

        Raises:
            ParticipationError: If the algorithm needs clients that the run lacks.
            DivergedError: If training diverged on the clients.
        """
        self._now, self._best = standing.now, standing.best
        self._model = ModelVersion.of(self.spec, standing.number, weights)
        (self.downloads.resume if resumed else self.downloads.publish)(self._model)
        self._state = replace(
            coordinator.initial(self._model.version, self._now),
            next_round=standing.number + 1,
            devices=self._devices(),
            position=standing.position,
            base=standing.base,
            members=standing.members,
            refused=standing.refused,
            record=ParticipationRecord.read(standing.took_part, standing.turnouts),
        )
        self._pending, self._is_finished = deque(), False
        self._step(states.Tick())
        if not self._pending:
            self._wait()
        if not self._pending:
            needed = attendance.presence(self._rules, self._state, self._now).needed
            raise ParticipationError(
                f"round {self._state.next_round} cannot open: it needs {needed} clients, and the tiers have "
                f"{len(self._state.devices)}; lower round.min_reports, or raise the count of a tier",
                needed=needed,
            )
        # One action at a time: whoever consumes the rounds reads each one before a later action ends the run.
        while self._pending and not self._is_finished:
            perform((self._pending.popleft(),), self)
            yield from self._ended
            self._ended.clear()
            if not self._pending and self._state.phase == "waiting":
                self._wait()

    def _step(self, event: states.Event) -> None:
        """Pass an event to the coordinator, and queue the actions that follow."""
        self._state, actions = coordinator.step(self._rules, self._state, event, self._now)
        self._pending.extend(actions)

    def _wait(self) -> None:
        """Advance the simulated time to the coordinator's next deadline, if there is one."""
        if (later := coordinator.wake_at(self._rules, self._state, self._now)) is not None:
            self._now = later
            self._step(states.Tick())

    # -- actions of the coordinator --------------------------------------------------------------------------

    def open_round(self, opened: OpenRound) -> None:
        """Train the clients of a round, and pass their results to the coordinator as events."""
        self._tally = RoundTally(time.perf_counter(), {})
        if self._rules.buffered:
            self._collect(opened)
        else:
            self._report(opened)

    def send_task(self, assignment: Assignment) -> None:
        """Do nothing: the clients of a round get their tasks when it opens."""

    def reassign(self, over: tuple[Assignment, ...], tasks: tuple[Assignment, ...]) -> None:
        """Do nothing: :class:`~edgefl.simulator.versions.ModelVersions` has assigned these tasks already."""

    def close_round(self, ended: OpenRound) -> None:
        """Compute the new model, publish and evaluate it, and report its version to the coordinator.

        If the server's step fails, the model is unchanged, and the round's row is ``abandoned`` with the reason.
        """
        aggregation = self._open_aggregation()
        devices = len(self._state.members) if self._rules.all_needed else len(self._state.devices)
        start = RoundModel(self._model, self.downloads)
        done = conclude_round(self.spec, ended, aggregation, start, devices=devices, best=self._best)
        if done.undone:
            self.warn(done.failed)
        row = self._end(ended, done, "abandoned" if done.failed else "closed", done.failed)
        self._step(states.ModelReady(self._model.version, done.failed, done.undone))
        self._ended.append(FinishedRound(row, self._model.weights, self._standing(ended.number, self._state)))

    def abandon_round(self, ended: OpenRound, text: str, *, restart: bool) -> None:
        """End a round with the model unchanged. ``text`` is the reason for its row."""
        row = self._end(ended, RoundConclusion(self._model.weights), "abandoned", text)
        self._ended.append(FinishedRound(row, self._model.weights, self._standing(ended.number, self._state)))

    def warn(self, text: str) -> None:
        """Report a warning."""
        self.listener.emit(Warned(tier="", text=text))

    def finish(self) -> None:
        """End the simulation."""
        self._is_finished = True

    def refuse(self, error: EdgeflError) -> None:
        """Raise ``error``, which ends the simulation."""
        raise error

    # -- clients ---------------------------------------------------------------------------------------------

    def _devices(self) -> Devices:
        return Devices(
            {
                name: RosterEntry(name, tier_of(self._rules.tiers, name, memory), samples, True, 0.0)
                for name, (samples, memory) in self._clients().items()
                if not self.fleet.absent(name)
            }
        )

    def _clients(self) -> dict[str, tuple[int, int]]:
        """Return (samples, memory in bytes) of each client, by name. A client reports exactly the memory that its tier
        requires.
        """
        needs = {tier.name: tier.memory_bytes for tier in self._rules.tiers}
        return {name: (count, needs[name.rpartition("-")[0]]) for name, count in self.data.samples.items()}

    def _report(self, opened: OpenRound) -> None:
        """Train as many clients as the round needs, in the order in which they would report, and pass their answers to
        the coordinator.
        """
        received = self.downloads.received(self._model) if compares_updates(self.spec) else {}
        start = RoundModel(self._model, FixedDownlink(received))
        self._aggregation = self._begin_aggregation(opened, start, {})
        index = self.spec.index(opened.position)
        hyper = round_hyperparameters(self.spec, opened.number, opened.position)
        tiers = {each.tier for each in opened.assignments.values()}
        fetched = {tier: self.downloads.fetch(self.functions[tier, index].manifest) for tier in tiers}
        weights = {tier: own.weights for tier, own in fetched.items()}
        task = RoundTask(opened, self._model, weights, hyper, received)
        self.trainers.begin(task, self._aggregation)
        self._tally.work |= self._work(opened, fetched)
        waiting = deque(self._arrivals(opened, self._tally.work))
        while waiting and not self._pending and self._state.round is not None:
            lacking = self._state.round.goal - len(self._state.round.with_status("accepted"))
            arrived = [waiting.popleft() for _ in range(min(max(1, lacking), len(waiting)))]
            self._now, wanted = opened.opened + arrived[-1][0], [each for _, each in arrived]
            portions = self._portions(wanted, opened, self._state.base)
            answers: dict[str, states.Answered | states.TaskDeclined] = {
                each.device: states.TaskDeclined(each.device, each.nonce, NO_CARRY) for each in wanted
            }
            for report in self.trainers.train(portions, self.carries.read):
                self._tally.down_bytes += fetched[opened.assignments[report.client].tier].nbytes
                answers[report.client] = self._take(report, opened, self._state.base)
            self._step(states.Answers(tuple(answers.values())))
        if not self._pending:
            self._now = opened.deadline
            self._step(states.Tick())

    def _collect(self, opened: OpenRound) -> None:
        """Train the clients whose updates an asynchronous round counts."""
        versions = self._versions
        window, reports, self._aggregation = versions.collect(
            self._state,
            opened,
            self._model,
            self._now,
            active=lambda older: self._begin_aggregation(opened, versions.began(opened.number), older),
            train=self._train,
        )
        self._state, self._now = window.state, window.now
        self._tally.energy_j = window.energy_j
        self._tally.staleness = [opened.number - task.round for task in window.taken]
        for task in window.taken:
            self._tally.down_bytes += versions.fetched(task).nbytes
            own = replace(opened, assignments=Assignments({task.device: task}))
            self._take(reports[task.nonce], own, opened.number)
        self._pending.extend(window.actions)

    def _train(self, task: RoundTask, active: RoundAggregation) -> Iterator[Report]:
        self.trainers.begin(task, active)
        wanted = list(task.opened.assignments.values())
        portions = self._portions(wanted, task.opened, task.opened.number)
        return self.trainers.train(portions, self.carries.read)

    def _work(self, opened: OpenRound, fetched: Mapping[str, FetchedWeights]) -> dict[str, ClientWork]:
        """Return the bytes and steps of each selected client, by name. ``fetched``: download of a client, by tier."""
        index, samples, most = self.spec.index(opened.position), self.data.samples, self._rules.samples
        work = {}
        for each in opened.assignments.values():
            steps = self.functions[each.tier, index].steps(samples[each.device], most)
            sizes = fetched[each.tier].nbytes, self.update_bytes[each.tier]
            work[each.device] = ClientWork(each.tier, steps, *sizes)
        return work

    def _arrivals(self, opened: OpenRound, work: Mapping[str, ClientWork]) -> list[tuple[float, Assignment]]:
        """Return (seconds since the round's begin, task) of each update that arrives before the deadline, earliest
        first.
        """
        fleet, arriving = self.fleet, []
        for each in opened.assignments.values():
            took = fleet.seconds(each.device, work[each.device])
            if took < self._rules.deadline_s and not fleet.vanishes(opened.number, each.tier, each.device):
                arriving.append((took, each))
        return sorted(arriving, key=lambda one: (one[0], fleet.place(opened.number, one[1].device)))

    def _portions(self, wanted: Sequence[Assignment], opened: OpenRound, base: int) -> list[ClientPortion]:
        """Divide the tasks ``wanted`` into portions, groups of clients of one tier that are trained together.

        Clients without a carry (stored state) that their algorithm requires are left out. The division does not depend
        on the trainers, because a group of other clients gives other bits.

        Args:
            wanted: Tasks to train.
            opened: Round whose algorithm is used.
            base: Last completed round, which decides about the validity of carries.
        """
        portions = []
        for tier in dict.fromkeys(each.tier for each in wanted):
            manifest = self.functions[tier, self.spec.index(opened.position)].manifest
            reads = any(graph.inputs_of("carry") for graph in manifest.of_round)
            own = [each for each in wanted if each.tier == tier]
            size = self.together or self.functions[tier, self.spec.index(opened.position)].together
            for first in range(0, len(own), size):
                some, kept = own[first : first + size], {}
                for each in some if reads else ():
                    begun = self._round_to_begin(each, opened, base)
                    if (
                        number := self.carries.choose(each.device, begun, manifest.carry_exchanges)
                    ) is not None:
                        kept[each.device] = number
                needed = reads and manifest.carry_needed
                taking = tuple(each.device for each in some if not needed or each.device in kept)
                portions.append(ClientPortion(tier, taking, kept))
        return [each for each in portions if each.clients]

    def _round_to_begin(self, assignment: Assignment, opened: OpenRound, base: int) -> RoundToBegin:
        algorithm = self.functions[assignment.tier, self.spec.index(opened.position)].manifest.program
        return RoundToBegin(RUN, f"{RUN}/{algorithm}/{assignment.tier}", opened.number, base)

    def _take(self, report: Report, opened: OpenRound, base: int) -> states.Answered:
        """Store the carry of a client's report (state that the algorithm keeps on it), and count the report in the round.

        Return the event for the coordinator.

        Args:
            report: Result of training the client.
            opened: The round.
            base: Last completed round, under which the carry is stored.
        """
        if report.refused:
            return states.Answered(report.client, accepted=False, reason=report.refused)
        self._tally.up_bytes += report.up_bytes
        self._tally.up_float32_bytes += report.up_float32_bytes
        if math.isfinite(report.loss):
            self._tally.losses[report.client] = report.loss
        if report.carry:
            task = opened.assignments[report.client]
            self.carries.keep(
                report.client, self._round_to_begin(task, opened, base), task.nonce, report.carry
            )
        return states.Answered(report.client, accepted=True)

    # -- models ----------------------------------------------------------------------------------------------

    def _begin_aggregation(
        self, opened: OpenRound, start: RoundModel, older: Mapping[int, RoundModel]
    ) -> RoundAggregation:
        return begin_aggregation(self.spec, opened, start, device=self.device, sums=self._sums, older=older)

    def _open_aggregation(self) -> RoundAggregation:
        assert self._aggregation is not None, "the coordinator ends rounds that it has opened"
        return self._aggregation

    def _end(self, ended: OpenRound, done: RoundConclusion, outcome: states.Outcome, text: str) -> RoundRow:
        """Publish the model after a round, evaluate it if that is due, and return the row of the round.

        Args:
            ended: The round.
            done: Result of the aggregation, with the model to publish.
            outcome: ``closed`` or ``abandoned``.
            text: Reason for the row.
        """
        aggregation, state, tally = self._open_aggregation(), self._state, self._tally
        weights = done.weights
        evaluated = None
        if ended.evaluates and not ended.measures and outcome == "closed":
            evaluated = evaluate_reports(self.spec, ended.number, aggregation, weights)
        self._sums = aggregation.aggregator.release_sums()
        self._model = ModelVersion.of(self.spec, ended.number, weights)
        self.downloads.publish(self._model)
        metrics: dict[str, float] = {}
        if self.spec.evaluate is not None and self.spec.evaluates(ended.number, outcome):
            judged = None if done.undone else done.metrics
            found = self.spec.evaluate(self.spec.model_of(weights)) if judged is None else judged
            self._best = self._best.after(found) if outcome == "closed" else self._best
            metrics = {name: value for name, value in found.items() if math.isfinite(value)}
        loss = metrics.pop("loss", None)
        losses = [tally.losses[name] for name in sorted(tally.losses)]
        return RoundRow(
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
            measures=ended.measures and outcome == "closed",
            evaluation=evaluated,
        )

    def _energy(self, ended: OpenRound, tally: RoundTally) -> float:
        """Return the joules that all selected clients spent in a round, without those that declined."""
        declined = {each.device for each in ended.with_status("declined")}
        took = self._now - ended.opened
        return math.fsum(
            self.fleet.joules(ended.number, client, work, took)
            for client, work in tally.work.items()
            if client not in declined
        )

    def _standing(self, number: int, state: State) -> SimulationState:
        return SimulationState(
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
