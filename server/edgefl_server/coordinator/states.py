"""What the coordinator works on, as plain data: the rules of a run, its state, what may happen, what is to be done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from edgefl.errors import DivergedError, EdgeflError, ParticipationError
from edgefl.wire.mqtt.messages import UNKNOWN_CONDITIONS, Conditions
from edgefl_server.coordinator.eligibility import EVERYONE, Selection
from edgefl_server.coordinator.fleet import Assignment, Assignments, Devices, Status
from edgefl_server.coordinator.record import Record
from edgefl_server.coordinator.rollout import Rollout, Trial
from edgefl_server.coordinator.roster import TierRule

# How much of an update counts that comes some versions late. Pure functions of a whole number.
#
# Of an update that begins from version v and is counted in the step from version u, the staleness is s = u - v: the
# number of server steps between. Its change is multiplied by the share, and it weighs what it weighs anyway: a buffer of
# late updates makes a shorter step (FedBuff, Nguyen et al. 2022, section 3: the sum of scaled changes over K).

Rule = Literal["sqrt", "inverse", "constant", "hinge"]

HINGE = 4
"""Versions without a loss, under the rule ``hinge``."""


def _hinge(versions: int) -> float:
    """FedAsync's (Xie et al. 2019, section 5.2), with a = 1: fresh enough counts whole."""
    return 1.0 if versions <= HINGE else 1.0 / (1.0 + versions - HINGE)


RULES: Mapping[Rule, Callable[[int], float]] = {
    "sqrt": lambda versions: 1.0 / math.sqrt(1.0 + versions),
    "inverse": lambda versions: 1.0 / (1.0 + versions),
    "constant": lambda _: 1.0,
    "hinge": _hinge,
}
"""By the name that a federation file has. Another one is a line here, and a name in :data:`Rule`: the journal keeps the
share of each update, so that a replay needs no rule."""


def share(rule: Rule, versions: int) -> float:
    """In (0, 1], 1 for 0 versions; ValueError for less than 0."""
    if versions < 0:
        raise ValueError(f"an update cannot be {versions} versions late")
    return RULES[rule](versions)


Outcome = Literal["closed", "abandoned"]

MOST_REASON = 32
"""Characters of a reason that are kept: a width any database holds."""

MOST_REFUSED = 3
"""Rounds in a row that end for a refused update before a run that needs every device gives up."""

MOST_SAMPLES = 1 << 24
"""Largest number of local samples a device may have: a number any database holds."""


@dataclass(frozen=True)
class Rules:
    """What the federation file says about rounds. Times in seconds.

    ``most_samples`` is the most an update may weigh if ``weighted``: what a device claims is taken on trust, and each
    doubling of what all devices of a round might weigh costs the sums one bit of everyone's changes. ``weight_cap`` is the
    same in multiples of the median of the round's devices (:func:`edgefl_server.coordinator.claims.weight_cap`).
    ``whole``: the algorithm needs every device in every round, and ``absent`` says what becomes of a round that lacks one.
    ``opening`` is the number of exchanges with which the method begins; it can begin again from any model if there are
    some. A device that spoils ``strikes`` rounds in a row is left out of the next ``bench_rounds``
    (:mod:`edgefl_server.coordinator.bench`).

    With a ``buffer`` rounds are versions that wait for nobody (:mod:`edgefl_server.coordinator.buffered`): one ends with
    so many updates, of which each counts by its ``staleness``, and is refused beyond ``max_staleness``; ``concurrency``
    devices (0: all) are at work.
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
    offline_grace_s: float = 30.0
    whole: bool = False
    absent: Literal["wait", "refuse", "partial"] = "wait"
    opening: int = 0
    strikes: int = 3
    bench_rounds: int = 8
    selection: Selection = EVERYONE
    rollout: Rollout | None = None
    buffer: int = 0
    concurrency: int = 0
    max_staleness: int = 0
    staleness: Rule = "sqrt"

    @property
    def buffered(self) -> bool:
        """Whether devices go on while versions of the model come and go."""
        return self.buffer > 0

    def share(self, versions: int) -> float:
        """The part of an update's change that counts, ``versions`` after its device began."""
        return share(self.staleness, versions) if self.buffered else 1.0

    @property
    def all_needed(self) -> bool:
        """Whether a round counts only if every one of its devices reports."""
        return self.whole and self.absent != "partial"


@dataclass(frozen=True)
class Version:
    """The model that a round begins from, and the number of exchanges completed before it."""

    model_version: str
    position: int


@dataclass(frozen=True)
class OpenRound:
    """The round under way: closes when ``goal`` updates are accepted. Times are epoch seconds.

    ``position`` is the number of exchanges completed before it. ``whole``: all of its devices must report.

    Where versions wait for nobody, ``older`` are the rounds before it whose devices are still at work as it opens,
    ``drawn`` is the number of tasks that begin from its own model, ``weight_cap`` the most that one of its updates weighs,
    and ``deadline`` when the next of its tasks may be over.
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
    def buffered(self) -> bool:
        """Whether it takes what began from earlier models, too, and ends when it has enough of that."""
        return self.weight_cap > 0

    @property
    def began(self) -> tuple[Assignment, ...]:
        """The tasks that begin from its own model: all of them, where each round has its own devices."""
        return tuple(each for each in self.assignments.values() if each.round == self.number)

    def version_of(self, number: int) -> str:
        """The model that round ``number`` began from; empty where updates of that are not taken."""
        if number == self.number:
            return self.model_version
        return self.older[number].model_version if number in self.older else ""

    def with_status(self, status: Status) -> tuple[Assignment, ...]:
        return tuple(each for each in self.assignments.values() if each.status == status)

    def count(self, status: Status) -> int:
        return self.assignments.count(status)


@dataclass(frozen=True)
class State:
    """Everything the coordinator knows. ``round`` is set while a round is open or closing.

    ``position`` counts the exchanges completed since the method began, or began again; ``base`` is the last round that
    was closed. ``members`` are the devices that must take part until the method begins again, where all are needed.
    ``refused`` counts the tries of the exchange at hand, one after the other, that ended for nothing but refused updates,
    declined tasks, or a step of the server that failed. ``strikes`` counts, by device, the rounds in a row that it spoiled;
    ``benched`` says before which round it is not selected again. ``held``: an operator lets no other round open.
    ``declined``: the devices that declined the last try, with the reason of each, if no device sent an update.
    ``record``: what the rounds so far say of the devices; ``trial``: how the candidate of a rollout does.

    Where versions wait for nobody: ``carried`` are the tasks that are open as a round has ended and the next has not begun,
    ``versions`` the last rounds before it.
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
    benched: Mapping[str, int] = field(default_factory=dict)
    held: bool = False
    record: Record = field(default_factory=Record)
    trial: Trial | None = None
    carried: Assignments = field(default_factory=lambda: Assignments({}))
    versions: Mapping[int, Version] = field(default_factory=dict)


# -- events ----------------------------------------------------------------------------------------------------


class DeviceHello(msgspec.Struct, frozen=True):
    """A device's introduction: live, after each connection it makes, or retained, after each of ours.

    Attributes:
        online: False if a status came before the first hello, and said so.
        again: True if only the conditions are new.
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
    """The broker says a device came or went. ``for_good``: it has no grace, as it is let in no more."""

    device: str
    online: bool
    for_good: bool = False


class DeviceLeft(msgspec.Struct, frozen=True):
    """A device gave its place to another, before it ever had a task."""

    device: str


class Answered(msgspec.Struct, frozen=True):
    """A device's update was accepted, or refused for good. ``reason``, for people, says why it was refused. ``nonce`` is
    that of the task, which may be over by now; empty for the one that is open."""

    device: str
    accepted: bool
    reason: str = ""
    nonce: str = ""


class Declined(msgspec.Struct, frozen=True):
    """A device will not answer the task with that nonce. ``reason`` is a short code."""

    device: str
    nonce: str
    reason: str


class TurnLost(msgspec.Struct, frozen=True):
    """A device did not send its update within its turn, while others waited. ``nonce`` is that of its task."""

    device: str
    nonce: str


class Answers(msgspec.Struct, frozen=True):
    """What several devices answered, as one step: only then is looked whether the round closes."""

    answers: tuple[Answered | Declined | TurnLost, ...]


class ModelReady(msgspec.Struct, frozen=True):
    """The closing round's model has been computed and saved. ``failed`` says why there is none, if the model stays;
    ``undone``: because it was bad (:mod:`edgefl_server.coordinator.collapse`), which the next one need not be."""

    model_version: str
    failed: str = ""
    undone: bool = False


class TrialCounted(msgspec.Struct, frozen=True):
    """The trial of a candidate, with the round that ended last, which the journal has."""

    trial: Trial


class Outage(msgspec.Struct, frozen=True):
    """The server could not be reached for ``seconds``: what it waits for may take that much longer."""

    seconds: float


class Hold(msgspec.Struct, frozen=True):
    """No other round is to open, or (not ``on``) rounds may open again."""

    on: bool


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = (
    DeviceHello
    | DeviceStatus
    | DeviceLeft
    | Answered
    | Declined
    | TurnLost
    | Answers
    | ModelReady
    | TrialCounted
    | Outage
    | Hold
    | Tick
)

# -- actions ---------------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True):
    """Journal the round, publish its weights, announce it and send every task."""

    round: OpenRound


class SendTask(msgspec.Struct, frozen=True):
    """Send one device its task (again)."""

    assignment: Assignment


class Reassign(msgspec.Struct, frozen=True):
    """Journal that the tasks ``over`` take no update any more (their status says why), and the new ``tasks``; send these."""

    over: tuple[Assignment, ...]
    tasks: tuple[Assignment, ...]


class Close(msgspec.Struct, frozen=True):
    """Compute the new model from the accepted updates, then report ModelReady."""

    round: OpenRound


class Abandon(msgspec.Struct, frozen=True):
    """Drop the round: the model stays as it is. ``restart``: the method begins again with the next one."""

    round: OpenRound
    text: str
    restart: bool = False


class Warn(msgspec.Struct, frozen=True):
    """Tell people; the run goes on."""

    text: str


class Refuse(msgspec.Struct, frozen=True):
    """End the run, unfinished, and say why. ``diverged``: the last round's updates were not finite."""

    text: str
    diverged: bool = False

    @property
    def error(self) -> EdgeflError:
        """The error that ends the run."""
        return (DivergedError if self.diverged else ParticipationError)(self.text)


class Finish(msgspec.Struct, frozen=True):
    """All rounds are over."""


Action = Open | SendTask | Reassign | Close | Abandon | Warn | Refuse | Finish
Actions = tuple[Action, ...]
