"""Asynchronous rounds (FedBuff) in a simulated federation's own time: working clients, their arrival times and initial
models.

Arrival times alone decide which updates a round counts. So clients are trained once these are known, and together if
they began from the same model. Only the refusal of an update is not known before: then the round is repeated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from edgefl.errors import ParticipationError
from edgefl.simulator.clients import ClientData, ClientWork, SimulatedFleet
from edgefl.simulator.downlink import FetchedWeights, SimulatedDownlink
from edgefl.simulator.functions import Functions
from edgefl.simulator.trainers.local_rounds import Report, RoundTask
from edgefl.wire.tensors import Arrays
from edgefl_server.coordinator import machine as coordinator
from edgefl_server.coordinator.fleet import Assignment, Assignments
from edgefl_server.coordinator.states import Actions, Answered, OpenRound, ReassignTasks, Rules, State, Tick
from edgefl_server.hyperparameters import round_hyperparameters
from edgefl_server.publish.model import ModelVersion
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.rounds import FixedDownlink, RoundModel
from edgefl_server.run_spec import RunSpec

_MOST_TICKS = 1_000
"""Expired tasks in a round after which the configuration is at fault."""

Arrival = tuple[float, float, Assignment]
"""Arrival time of an update, its order among equal times, and its task."""


@dataclass
class VersionWindow:
    """Asynchronous round in progress.

    Attributes:
        state: State of the coordinator.
        now: Federation time in seconds.
        waiting: Heap of scheduled arrivals, (time, tie-breaker, task).
        taken: Tasks whose updates the round counts, in the order of arrival.
        actions: Actions of the coordinator that end the round.
        energy_j: Joules that clients spent on tasks that ended in the round.
    """

    state: State
    now: float
    waiting: list[Arrival]
    taken: list[Assignment] = field(default_factory=list)
    actions: Actions = ()
    energy_j: float = 0.0

    def together(self) -> Iterator[list[Assignment]]:
        """Yield lists of tasks that can be trained together: tasks of different clients that began from one model.

        The tasks of a client stay in their order.
        """
        groups: dict[tuple[int, int], list[Assignment]] = {}
        had: dict[str, int] = {}
        for task in self.taken:
            turn = had[task.device] = had.get(task.device, -1) + 1
            groups.setdefault((turn, task.round), []).append(task)
        for _, tasks in sorted(groups.items(), key=lambda each: each[0]):
            yield tasks


@dataclass(frozen=True)
class _RoundStart:
    """Inputs of the clients that begin in a round.

    Attributes:
        model: Model of the round.
        fetched: Download of a client, by tier.
        hyper: Scalars of the algorithm, by name.
        received: Weights as clients receive them, by global name.
    """

    model: ModelVersion
    fetched: Mapping[str, FetchedWeights]
    hyper: Mapping[str, float]
    received: Arrays


@dataclass
class ModelVersions:
    """Asynchronous rounds: the models that clients train, and the arrival times of their updates.

    Attributes:
        spec: Specification of the run.
        rules: Rules of the coordinator.
        functions: Functions of the clients, by (tier, index of the exchange).
        data: Training data of the clients.
        downloads: Encoder of the models.
        fleet: Speed and losses of the clients.
        update_bytes: Size of an update, by tier.
    """

    spec: RunSpec
    rules: Rules
    functions: Mapping[tuple[str, int], Functions]
    data: ClientData
    downloads: SimulatedDownlink
    fleet: SimulatedFleet
    update_bytes: Mapping[str, int]
    _starts: dict[int, _RoundStart] = field(default_factory=dict, init=False)
    _waiting: list[Arrival] = field(default_factory=list, init=False)

    def fetched(self, task: Assignment) -> FetchedWeights:
        """Return the download with which a client begins its task."""
        return self._starts[task.round].fetched[task.tier]

    def collect(
        self,
        state: State,
        opened: OpenRound,
        model: ModelVersion,
        now: float,
        *,
        active: Callable[[Mapping[int, RoundModel]], RoundAggregation],
        train: Callable[[RoundTask, RoundAggregation], Iterable[Report]],
    ) -> tuple[VersionWindow, Mapping[str, Report], RoundAggregation]:
        """Run an asynchronous round and train its clients.

        If the server refuses an update, the round is repeated without it.

        Args:
            state: State of the coordinator.
            opened: The round.
            model: Its model.
            now: Federation time in seconds.
            active: Function that makes empty sums from the models of earlier rounds, by round number.
            train: Function that trains clients and adds their updates to the sums.

        Returns:
            The finished window, the reports by the nonces of their tasks, and the sums.

        Raises:
            ParticipationError: If too few clients finish before their deadlines.
        """
        self._begin(opened, model)
        older = {number: self.began(number) for number in opened.older}
        refused: dict[str, str] = {}
        while True:
            window, sums = self._run_window(state, opened, now, refused), active(older)
            reports = {
                task.nonce: report
                for tasks in window.together()
                for task, report in self._train(tasks, opened, model, sums, train)
            }
            bad = {nonce: report.refused for nonce, report in reports.items() if report.refused}
            if not bad:
                self._waiting = window.waiting
                return window, reports, sums
            refused |= bad

    def _begin(self, opened: OpenRound, model: ModelVersion) -> None:
        tiers = self.spec.exchange(opened.position).tiers
        index = self.spec.index(opened.position)
        start = _RoundStart(
            model,
            {tier: self.downloads.fetch(self.functions[tier, index].manifest) for tier in tiers},
            round_hyperparameters(self.spec, opened.number, opened.position),
            self.downloads.received(model),
        )
        live = {number: self._starts[number] for number in opened.older}
        self._starts = {**live, opened.number: start}

    def began(self, number: int) -> RoundModel:
        """Return the model from which round ``number`` began."""
        start = self._starts[number]
        return RoundModel(start.model, FixedDownlink(start.received))

    def _train(
        self,
        tasks: list[Assignment],
        opened: OpenRound,
        model: ModelVersion,
        active: RoundAggregation,
        train: Callable[[RoundTask, RoundAggregation], Iterable[Report]],
    ) -> Iterator[tuple[Assignment, Report]]:
        """Train tasks of different clients that began from one model. Yield (task, its report).

        Args:
            tasks: The tasks, one per client.
            opened: Round that counts the updates.
            model: Its model.
            active: Its sums.
            train: Function that trains clients and adds their updates to the sums.
        """
        number, own = tasks[0].round, {task.device: task for task in tasks}
        start = self._starts[number]
        task = RoundTask(
            replace(opened, assignments=Assignments(own)),
            model,
            {tier: fetched.weights for tier, fetched in start.fetched.items()},
            start.hyper,
            start.received,
            None if number == opened.number else start.model,
        )
        for report in train(task, active):
            yield own[report.client], report

    # -- time ------------------------------------------------------------------------------------------------

    def _run_window(
        self, state: State, opened: OpenRound, now: float, refused: Mapping[str, str]
    ) -> VersionWindow:
        """Return the asynchronous round at the time when the coordinator ends it.

        ``refused``: reasons by nonce of the tasks whose updates do not count.

        Raises:
            ParticipationError: If too few clients finish before their deadlines.
        """
        window = VersionWindow(state, now, list(self._waiting))
        for task in opened.began:
            self._give(window, task)
        ticks = 0
        while ticks < _MOST_TICKS:
            current = window.state.round
            assert current is not None
            wake = coordinator.wake_at(self.rules, window.state, window.now)
            due = window.waiting[0][0] if window.waiting else None
            if due is None or (wake is not None and wake < due):
                assert wake is not None  # an open round has tasks, or looks for devices now and then
                window.now, ticks = max(wake, window.now), ticks + 1
                self._step(window, Tick())
            else:
                window.now, _, task = heapq.heappop(window.waiting)
                if current.assignments.open.get(task.device) == task:
                    self._answer(window, task, refused.get(task.nonce, ""))
            if window.actions:
                return window
        raise ParticipationError(
            f"round {opened.number} has no {opened.goal} updates after {_MOST_TICKS} times: no client is ready before its "
            "time is over; raise limits.round_deadline_s, or lower simulation.dropout",
            round=opened.number,
            goal=opened.goal,
        )

    def _answer(self, window: VersionWindow, task: Assignment, refused: str) -> None:
        if not refused:
            window.taken.append(task)
        window.energy_j += self._joules(task)
        self._step(window, Answered(task.device, accepted=not refused, reason=refused))

    def _step(self, window: VersionWindow, event: Answered | Tick) -> None:
        window.state, actions = coordinator.step(self.rules, window.state, event, window.now)
        for action in actions:
            if isinstance(action, ReassignTasks):
                for task in action.over:
                    window.energy_j += self._joules(task)
                for task in action.tasks:
                    self._give(window, task)
        window.actions = tuple(action for action in actions if not isinstance(action, ReassignTasks))

    def _give(self, window: VersionWindow, task: Assignment) -> None:
        """Start a client's task: schedule the arrival of its update, unless it is lost."""
        if not self.fleet.vanishes(_turn(task), task.tier, task.device):
            took = self.fleet.seconds(task.device, self._work(task))
            place = self.fleet.place(_turn(task), task.device)
            heapq.heappush(window.waiting, (window.now + took, place, task))

    def _work(self, task: Assignment) -> ClientWork:
        functions = self.functions[task.tier, 0]  # such a method has one exchange
        steps = functions.steps(self.data.samples[task.device], self.rules.samples)
        return ClientWork(task.tier, steps, self.fetched(task).nbytes, self.update_bytes[task.tier])

    def _joules(self, task: Assignment) -> float:
        """Return the joules that a client spent on a task that ended, finished or not."""
        return self.fleet.joules(_turn(task), task.device, self._work(task), self.rules.deadline_s)


def _turn(task: Assignment) -> int:
    """Return a number from the task's nonce, to draw random numbers for the task as others are drawn for a round number."""
    return int(task.nonce[:12], 16)
