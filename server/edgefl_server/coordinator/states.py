"""Data of the coordinator: rules of a run, state, events and actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from edgefl.errors import DivergedError, EdgeflError, ParticipationError
from edgefl.wire.mqtt.messages import UNKNOWN_CONDITIONS, Conditions
from edgefl_server.coordinator.eligibility import EVERYONE, SelectionRules
from edgefl_server.coordinator.fleet import Assignment, Assignments, Devices, Status
from edgefl_server.coordinator.record import ParticipationRecord
from edgefl_server.coordinator.rollout import RolloutRules, Trial
from edgefl_server.coordinator.roster import TierRule

# How much of an update counts that comes some versions late. Pure functions of a whole number.
#
# Of an update that begins from version v and is counted in the step from version u, the staleness is s = u - v: the
# number of server steps between. Its change is multiplied by the share, and it weighs what it weighs anyway: a buffer of
# late updates makes a shorter step (FedBuff, Nguyen et al. 2022, section 3: the sum of scaled changes over K).

Rule = Literal["sqrt", "inverse", "constant", "hinge"]

HINGE = 4
"""Largest staleness in versions that the rule ``hinge`` does not discount."""


def _hinge(versions: int) -> float:
    """Return the weight factor of an update that is ``versions`` rounds old: 1 up to HINGE, then 1 / (1 + excess).

    (FedAsync, Xie et al. 2019, section 5.2, a = 1.)
    """
    return 1.0 if versions <= HINGE else 1.0 / (1.0 + versions - HINGE)


RULES: Mapping[Rule, Callable[[int], float]] = {
    "sqrt": lambda versions: 1.0 / math.sqrt(1.0 + versions),
    "inverse": lambda versions: 1.0 / (1.0 + versions),
    "constant": lambda _: 1.0,
    "hinge": _hinge,
}
"""Staleness rules by the name in a federation file. A new one needs a line here and a name in :data:`Rule`. The
journal stores the share of each update, so a replay does not need the rule."""


def share(rule: Rule, versions: int) -> float:
    """Return the factor in (0, 1] for an update that began ``versions`` rounds ago, by staleness rule ``rule``; 1 for
    0 versions.

    Raises:
        ValueError: If ``versions`` is negative.
    """
    if versions < 0:
        raise ValueError(f"an update cannot be {versions} versions late")
    return RULES[rule](versions)


Outcome = Literal["closed", "abandoned"]

MOST_REASON = 32
"""Number of characters of a reason that are stored, which any database supports."""

MOST_REFUSED = 3
"""Number of failed rounds in a row with refused updates only that ends the run."""

MOST_SAMPLES = 1 << 24
"""Largest number of local samples of a device, which any database supports."""


EVALUATION = -1
"""Position of a round in which devices evaluate the model instead of training it. No exchange is completed by it."""

MEASURING = -2
"""Position of a round in which devices measure the statistics of batch norm for the evaluation round behind it."""


@dataclass(frozen=True)
class EvaluationSchedule:
    """Evaluation rounds of a run, and their devices.

    Evaluation rounds have numbers of their own. With ``every`` = 5 the rounds 6, 12, 18, ... are evaluation rounds, and one
    follows the last training round. If devices measure the statistics of batch norm, these are the rounds 7, 14, 21, ...,
    and each has a measuring round before it.

    Attributes:
        every: Training rounds between two evaluation rounds; 0 for none.
        devices: Accepted reports that close an evaluation round; 0 for those of all devices that are present.
        extra: Rounds after the end of the run, for evaluations that an operator requested.
        measures: True if devices measure the statistics of batch norm before each evaluation.
    """

    every: int = 0
    devices: int = 0
    extra: int = 0
    measures: bool = False

    @property
    def length(self) -> int:
        """Number of rounds of an evaluation: the measuring round, if there is one, and the evaluation round."""
        return 1 + self.measures

    def planned_rounds(self, rounds: int) -> int:
        """Return the number of training, evaluation and measuring rounds, without the requested ones in ``extra``."""
        return rounds + (-(-rounds // self.every) * self.length if self.every else 0)

    def last_round(self, rounds: int) -> int:
        """Return the number of the last round of a run with ``rounds`` training rounds."""
        return self.planned_rounds(rounds) + self.extra

    def continued(self, ended: int, begun: int, *, more: bool) -> EvaluationSchedule:
        """Return the schedule of a run that continues after its planned rounds. An evaluation in progress is completed.

        Args:
            ended: Number of rounds after the planned ones that have ended.
            begun: Number of rounds after the planned ones that have begun, including the open one.
            more: True to add one evaluation. If an evaluation is in progress, no further one is added.
        """
        evaluations = ended // self.length + 1 if more else -(-begun // self.length)
        return replace(self, extra=evaluations * self.length)

    def includes(self, number: int, rounds: int) -> bool:
        """Return True if no device trains in round ``number``: it is an evaluation round or a measuring round."""
        planned = self.planned_rounds(rounds)
        if not self.every:
            return number > planned
        return number > planned - self.length or (number - 1) % (self.every + self.length) >= self.every

    def position(self, number: int, rounds: int) -> int:
        """Return :data:`EVALUATION` if devices evaluate the model in round ``number``, :data:`MEASURING` if they
        measure batch norm.

        The round must not be a training round. ``rounds`` is the number of training rounds of the run.
        """
        planned, cycle = self.planned_rounds(rounds), self.every + self.length
        is_cycle_over = number > planned - self.length  # the last ones, and those that an operator requested
        place = (number - planned - 1) % self.length if is_cycle_over else (number - 1) % cycle - self.every
        return EVALUATION if place == self.length - 1 else MEASURING

    def trained(self, number: int, rounds: int) -> int:
        """Return the number of training rounds among the first ``number`` rounds, at most ``rounds``."""
        if not self.every:
            return min(rounds, number)
        cycles, rest = divmod(number, self.every + self.length)
        return min(rounds, cycles * self.every + min(rest, self.every))


@dataclass(frozen=True)
class Rules:
    """Rules of a run, from its federation file. Times are in seconds.

    Attributes:
        run: Identifier of the run.
        seed: Seed of the federation.
        rounds: Number of training rounds.
        tiers: Rules by which devices belong to tiers.
        min_devices: Number of devices that the first round waits for.
        min_reports: Smallest number of accepted updates; a round with fewer is abandoned.
        fraction: Share of the candidates whose updates close a round.
        over_selection: Selected devices as a multiple of the needed updates, to make up for lost tasks.
        weighted: True if updates are weighted by their numbers of samples.
        samples: Largest number of samples that a device trains with in a round; 0 for all.
        most_samples: Largest weight of an update if ``weighted``. The server cannot verify a device's number of
            samples, and each doubling of the possible total weight costs the sums one bit of precision.
        weight_cap: Largest weight of an update as a multiple of the round's median
            (:func:`edgefl_server.coordinator.claims.weight_cap`).
        deadline_s: Longest duration of a round; in asynchronous rounds, of a task.
        ready_timeout_s: Longest wait of the first round for ``min_devices``.
        gather_s: Time for which a round waits for all devices that connect, instead of ``min_devices``; 0 for none.
        offline_grace_s: Time that a device may be offline before it counts as gone.
        whole: True if the algorithm needs every device in every round.
        absent: Reaction to a missing device if ``whole``: ``refuse`` (end the run), ``wait`` or ``partial``.
        opening: Number of exchanges (round trips) that run once, at the start of the algorithm. If it is not 0, the
            algorithm can start again from any model.
        strikes: Number of spoiled rounds in a row after which a device is suspended.
        bench_rounds: Number of rounds of a suspension (:mod:`edgefl_server.coordinator.suspension`).
        selection: Options of the selection of devices.
        rollout: Options of the trial of a candidate bundle, or None.
        buffer: Updates of an asynchronous round (:mod:`edgefl_server.coordinator.buffered`); 0 for synchronous rounds.
        concurrency: Devices that have a task at any time in asynchronous rounds; 0 for all.
        max_staleness: Rounds after which an update is refused in asynchronous rounds.
        staleness: Rule that weights late updates.
        evaluation: Rounds in which devices evaluate the model.
    """

    run: str
    seed: int
    rounds: int
    tiers: tuple[TierRule, ...]
    min_devices: int = 1
    min_reports: int = 1
    fraction: float = 1.0
    over_selection: float = 1.0
    weighted: bool = False
    samples: int = 0
    most_samples: int = 1 << 20
    weight_cap: float = 4.0
    deadline_s: float = 120.0
    ready_timeout_s: float = 120.0
    gather_s: float = 0.0
    offline_grace_s: float = 30.0
    whole: bool = False
    absent: Literal["wait", "refuse", "partial"] = "wait"
    opening: int = 0
    strikes: int = 3
    bench_rounds: int = 8
    selection: SelectionRules = EVERYONE
    rollout: RolloutRules | None = None
    buffer: int = 0
    concurrency: int = 0
    max_staleness: int = 0
    staleness: Rule = "sqrt"
    evaluation: EvaluationSchedule = EvaluationSchedule()

    @property
    def last_round(self) -> int:
        """Number of the last round: ``rounds`` training rounds and the evaluation rounds."""
        return self.evaluation.last_round(self.rounds)

    def is_evaluation(self, number: int) -> bool:
        """Return True if devices evaluate the model in round ``number``, or measure statistics for that, instead of
        training it.
        """
        return self.evaluation.includes(number, self.rounds)

    @property
    def last_training(self) -> int:
        """Number of the run's final training round."""
        return self.evaluation.planned_rounds(self.rounds) - (
            self.evaluation.length if self.evaluation.every else 0
        )

    def of_round(self, number: int) -> Rules:
        """Return the rules by which round ``number`` opens and closes.

        An evaluation round needs only one report, and waits for no quorum. For a training round the result is these rules.
        """
        if not self.is_evaluation(number):
            return self
        anyone = replace(self.selection, quorum=0.0, measured=False)
        return replace(self, whole=False, min_reports=1, selection=anyone)

    def trained_rounds(self, number: int) -> int:
        """Return the number of training rounds among the first ``number`` rounds."""
        return self.evaluation.trained(number, self.rounds)

    @property
    def buffered(self) -> bool:
        """True for asynchronous rounds."""
        return self.buffer > 0

    def share(self, versions: int) -> float:
        """Return the factor, at most 1, of the change in an update that began ``versions`` rounds ago. 1 in
        synchronous rounds.
        """
        return share(self.staleness, versions) if self.buffered else 1.0

    @property
    def all_needed(self) -> bool:
        """True if a round closes only after every one of its devices has an accepted update."""
        return self.whole and self.absent != "partial"


@dataclass(frozen=True)
class Version:
    """Model that the tasks of a round begin from.

    Attributes:
        model_version: Version of the model.
        position: Number of the algorithm's completed exchanges (round trips) before the round.
    """

    model_version: str
    position: int


@dataclass(frozen=True)
class OpenRound:
    """Round in progress, which closes when ``goal`` updates are accepted. Times are epoch seconds.

    Attributes:
        number: Number of the round, from 1.
        model_version: Model that its tasks begin from.
        opened: Time at which it opened.
        deadline: End of the round; in asynchronous rounds, the end of its next task.
        goal: Number of accepted updates that closes it.
        assignments: Its tasks by device.
        position: Number of the algorithm's completed exchanges (round trips) before it; :data:`EVALUATION` if devices
            evaluate the model, :data:`MEASURING` if they measure the statistics of batch norm.
        whole: True if all of its devices must report.
        older: In asynchronous rounds, the earlier rounds whose tasks are still open, by number.
        drawn: In asynchronous rounds, the number of tasks that begin from its own model.
        weight_cap: In asynchronous rounds, the largest weight of one update; 0 in synchronous rounds.
    """

    number: int
    model_version: str
    opened: float
    deadline: float
    goal: int
    assignments: Assignments
    position: int = 0
    whole: bool = False
    older: Mapping[int, Version] = field(default_factory=dict)
    drawn: int = 0
    weight_cap: int = 0

    @property
    def evaluates(self) -> bool:
        """True if devices report sums over their rows instead of training: to evaluate the model, or to measure the
        statistics of batch norm.
        """
        return self.position in (EVALUATION, MEASURING)

    @property
    def measures(self) -> bool:
        """True if devices measure the statistics of batch norm in this round."""
        return self.position == MEASURING

    @property
    def buffered(self) -> bool:
        """True for an asynchronous round, which also accepts updates that began from earlier models."""
        return self.weight_cap > 0

    @property
    def began(self) -> tuple[Assignment, ...]:
        """Tasks that begin from the model of this round. In synchronous rounds these are all tasks."""
        return tuple(each for each in self.assignments.values() if each.round == self.number)

    def version_of(self, number: int) -> str:
        """Return the version of the model that tasks of round ``number`` begin from.

        It is empty if this round accepts no updates of tasks of that round.
        """
        if number == self.number:
            return self.model_version
        return self.older[number].model_version if number in self.older else ""

    def with_status(self, status: Status) -> tuple[Assignment, ...]:
        """Return the tasks with this status."""
        return tuple(each for each in self.assignments.values() if each.status == status)

    def count(self, status: Status) -> int:
        """Return the number of tasks with this status. In asynchronous rounds it includes replaced tasks that were
        accepted.
        """
        return self.assignments.count(status)


@dataclass(frozen=True)
class State:
    """State of the coordinator.

    Attributes:
        phase: Phase of the state machine.
        next_round: Number of the round that opens next, or that is open.
        model_version: Version of the current global model.
        waiting_since: Epoch seconds at which the phase ``waiting`` began.
        devices: Known devices by name.
        round: The round that is open or closing; None between rounds.
        position: Completed exchanges (round trips of the algorithm) since the algorithm began, or began again.
        base: Number of the last closed round; 0 before the first.
        members: Devices that must take part until the algorithm begins again; empty if not all devices are needed.
        refused: Failed attempts of the present exchange in a row, if all failed only by refused updates, declined
            tasks, or a failed server step.
        declined: Devices that declined the last attempt, with reasons, if no device sent an update.
        strikes: Rounds in a row that each device spoiled.
        suspended: First round that may select each suspended device again, by device.
        held: True while an operator lets no other round open.
        record: Participation of the devices so far.
        trial: Trial of a candidate bundle; None if no trial began.
        carried: Between asynchronous rounds, the open tasks.
        versions: Between asynchronous rounds, the models of the last rounds, by round.
    """

    phase: Literal["waiting", "open", "closing", "done"]
    next_round: int
    model_version: str
    waiting_since: float
    devices: Devices = field(default_factory=Devices)
    round: OpenRound | None = None
    position: int = 0
    base: int = 0
    members: tuple[str, ...] = ()
    refused: int = 0
    declined: Mapping[str, str] = field(default_factory=dict)
    strikes: Mapping[str, int] = field(default_factory=dict)
    suspended: Mapping[str, int] = field(default_factory=dict)
    held: bool = False
    record: ParticipationRecord = field(default_factory=ParticipationRecord)
    trial: Trial | None = None
    carried: Assignments = field(default_factory=lambda: Assignments({}))
    versions: Mapping[int, Version] = field(default_factory=dict)


# -- events ----------------------------------------------------------------------------------------------------


class DeviceHello(msgspec.Struct, frozen=True):
    """Event: a device sent its hello message, which describes it.

    It arrives when the device connects, and again, as a retained message, when the server connects.

    Attributes:
        device: Name of the device.
        memory_bytes: Memory that it offers.
        samples: Number of its local samples.
        online: False if an earlier status message reported the device offline.
        conditions: Power, link and temperature that it reports.
        again: True if only the conditions changed.
        message: The encoded hello, for the journal.
    """

    device: str
    memory_bytes: int
    samples: int
    online: bool = True
    conditions: Conditions = UNKNOWN_CONDITIONS
    again: bool = False
    message: bytes = b""


class DeviceStatus(msgspec.Struct, frozen=True):
    """Event: the broker reports a device online or offline.

    Attributes:
        device: Name of the device.
        online: True if it is connected.
        for_good: True if the device may not come back, because its key is invalid; it then counts as offline for
            longer than the grace.
    """

    device: str
    online: bool
    for_good: bool = False


class DeviceLeft(msgspec.Struct, frozen=True):
    """Event: the server forgets a device that never had a task, to make room for another device."""

    device: str


class Answered(msgspec.Struct, frozen=True):
    """Event: the update of a device was accepted, or refused so that it cannot be sent again.

    Attributes:
        device: Name of the device.
        accepted: True if the update was accepted.
        reason: Explanation of a refusal, for people; empty if the update was accepted.
        nonce: Nonce of the task, which may be over; empty for the device's open task.
    """

    device: str
    accepted: bool
    reason: str = ""
    nonce: str = ""


class TaskDeclined(msgspec.Struct, frozen=True):
    """Event: a device declined the task with this nonce. ``reason`` is a short code."""

    device: str
    nonce: str
    reason: str


class TurnLost(msgspec.Struct, frozen=True):
    """Event: a device did not upload its requested update in time while others waited. ``nonce`` identifies its task."""

    device: str
    nonce: str


class Answers(msgspec.Struct, frozen=True):
    """Event: answers of several devices, handled in one step so that the round does not close between them."""

    answers: tuple[Answered | TaskDeclined | TurnLost, ...]


class ModelReady(msgspec.Struct, frozen=True):
    """Event: the model after the closing round has been computed and saved, or the round gave none.

    Attributes:
        model_version: Version of the current model.
        failed: Reason why the old model is kept; empty if there is a new one.
        undone: True if the new model was rejected by the rollback rule (:mod:`edgefl_server.coordinator.collapse`).
    """

    model_version: str
    failed: str = ""
    undone: bool = False


class TrialCounted(msgspec.Struct, frozen=True):
    """Event: the last round was added to the trial of a candidate bundle. ``trial`` is its new state, already in the
    journal.
    """

    trial: Trial


class Outage(msgspec.Struct, frozen=True):
    """Event: for ``seconds`` devices could not reach the server. All deadlines are moved by that time."""

    seconds: float


class Hold(msgspec.Struct, frozen=True):
    """Event: an operator stops further rounds from opening (``on``), or permits them again."""

    on: bool


class Tick(msgspec.Struct, frozen=True):
    """Event: time has passed, and nothing else happened."""


Event = (
    DeviceHello
    | DeviceStatus
    | DeviceLeft
    | Answered
    | TaskDeclined
    | TurnLost
    | Answers
    | ModelReady
    | TrialCounted
    | Outage
    | Hold
    | Tick
)

# -- actions ---------------------------------------------------------------------------------------------------


class StartRound(msgspec.Struct, frozen=True):
    """Action: journal the round, publish its weights, announce it and send its tasks."""

    round: OpenRound


class SendTask(msgspec.Struct, frozen=True):
    """Action: send one device its task again."""

    assignment: Assignment


class ReassignTasks(msgspec.Struct, frozen=True):
    """Action: journal the end of the tasks ``over``, whose updates are refused from now on, and send the new
    ``tasks``.

    Only asynchronous rounds have it.
    """

    over: tuple[Assignment, ...]
    tasks: tuple[Assignment, ...]


class CloseRound(msgspec.Struct, frozen=True):
    """Action: compute the new model from the accepted updates of the round, then send the event ModelReady."""

    round: OpenRound


class AbandonRound(msgspec.Struct, frozen=True):
    """Action: end the round without a new model.

    Attributes:
        round: The round.
        text: Reason, for people.
        restart: True if the algorithm begins again with the next round.
    """

    round: OpenRound
    text: str
    restart: bool = False


class Warn(msgspec.Struct, frozen=True):
    """Action: report a warning to people."""

    text: str


class RefuseRun(msgspec.Struct, frozen=True):
    """Action: end the run early.

    Attributes:
        text: Reason and remedy, for people.
        diverged: True if no update of the last round was finite.
    """

    text: str
    diverged: bool = False

    @property
    def error(self) -> EdgeflError:
        """Return the error that ends the run: DivergedError if training diverged, else ParticipationError."""
        return (DivergedError if self.diverged else ParticipationError)(self.text)


class FinishRun(msgspec.Struct, frozen=True):
    """Action: end the run after its last round."""


Action = StartRound | SendTask | ReassignTasks | CloseRound | AbandonRound | Warn | RefuseRun | FinishRun
Actions = tuple[Action, ...]
