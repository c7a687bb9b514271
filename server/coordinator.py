"""The rounds of a run as a pure state machine: ``step(rules, state, event, now) -> (state, actions)``.

No clock, no random source and no I/O: time comes in with each event, choices follow from the federation's seed. ::

    waiting --(enough devices)--> open --(goal met, all answered, or deadline)--> closing --ModelReady--> waiting
                                   |                                                                        |
                                   +--(too few reports)--> waiting           (no round left) --> done <-----+

The service carries out the actions in order, and journals them before anyone else hears of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from server import roster
from server.roster import Device, TierRule

Outcome = Literal["closed", "abandoned"]

MOST_SAMPLES = 1 << 24
"""Largest number of local samples a device may have: a number any database holds."""


@dataclass(frozen=True)
class Rules:
    """What the federation file says about rounds. Times in seconds.

    ``most_samples`` is the most an update may weigh if ``weighted``: what a device claims is taken on trust, and each
    doubling of what all devices of a round might weigh costs the sums one bit of everyone's changes.
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
    deadline_s: float = 120.0
    ready_timeout_s: float = 120.0
    offline_grace_s: float = 30.0


@dataclass(frozen=True)
class Assignment:
    """A device's part in a round. ``weight_limit`` is the most its update may weigh."""

    device: str
    tier: str
    seed: int
    nonce: str
    weight_limit: int = 1
    status: Literal["open", "accepted", "rejected"] = "open"


@dataclass(frozen=True)
class OpenRound:
    """The round under way: closes when ``goal`` updates are accepted. Times are epoch seconds."""

    number: int
    model_version: str
    opened: float
    deadline: float
    goal: int
    assignments: Mapping[str, Assignment]

    def with_status(self, status: Literal["open", "accepted", "rejected"]) -> tuple[Assignment, ...]:
        return tuple(a for _, a in sorted(self.assignments.items()) if a.status == status)

    @property
    def weight_limit(self) -> int:
        return sum(assignment.weight_limit for assignment in self.assignments.values())


@dataclass(frozen=True)
class State:
    """Everything the coordinator knows. ``round`` is set while a round is open or closing."""

    phase: Literal["waiting", "open", "closing", "done"]
    next_round: int
    model_version: str
    waiting_since: float
    devices: Mapping[str, Device] = field(default_factory=dict)
    round: OpenRound | None = None


# -- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceHello:
    """A device's introduction: live, after each connection it makes, or retained, after each of ours."""

    device: str
    memory_bytes: int
    samples: int


@dataclass(frozen=True)
class DeviceStatus:
    """The broker says a device came or went."""

    device: str
    online: bool


@dataclass(frozen=True)
class Answered:
    """A device's update was accepted, or refused for good."""

    device: str
    accepted: bool


@dataclass(frozen=True)
class ModelReady:
    """The closing round's model has been computed and saved."""

    model_version: str


@dataclass(frozen=True)
class Outage:
    """The server could not be reached for ``seconds``: what it waits for may take that much longer."""

    seconds: float


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = DeviceHello | DeviceStatus | Answered | ModelReady | Outage | Tick

# -- actions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """Journal the round, publish its weights, announce it and send every task."""

    round: OpenRound


@dataclass(frozen=True)
class SendTask:
    """Send one device its task (again)."""

    assignment: Assignment


@dataclass(frozen=True)
class Close:
    """Compute the new model from the accepted updates, then report ModelReady."""

    round: OpenRound


@dataclass(frozen=True)
class Abandon:
    """Drop the round: the model stays as it is."""

    round: OpenRound
    text: str


@dataclass(frozen=True)
class Finish:
    """All rounds are over."""


Action = Open | SendTask | Close | Abandon | Finish
Actions = tuple[Action, ...]


def initial(model_version: str, now: float) -> State:
    """Before the first round."""
    return State("waiting", 1, model_version, now)


def step(rules: Rules, state: State, event: Event, now: float) -> tuple[State, Actions]:
    """The state after ``event``, and what the service is to do, in order."""
    match event:
        case DeviceHello():
            return _hello(rules, state, event, now)
        case DeviceStatus():
            return _settle(rules, _seen(state, event, now), now)
        case Answered():
            return _settle(rules, _answered(state, event), now)
        case Outage():
            return _settle(rules, _delayed(state, event.seconds), now)
        case ModelReady() if state.phase == "closing" and state.round is not None:
            ended = replace(state, model_version=event.model_version)
            return _settle(rules, _between_rounds(ended, state.round.number, now), now)
    return _settle(rules, state, now)


def wake_at(rules: Rules, state: State, now: float) -> float | None:
    """When a Tick may change something (epoch seconds), or None if only other events can."""
    if state.phase == "open" and state.round is not None:
        given_up = _given_up_at(rules, state, state.round)
        return state.round.deadline if given_up is None else min(given_up, state.round.deadline)
    ready = state.waiting_since + rules.ready_timeout_s
    return ready if state.phase == "waiting" and state.next_round == 1 and ready > now else None


def _hello(rules: Rules, state: State, event: DeviceHello, now: float) -> tuple[State, Actions]:
    """A hello is retained, so it may be old news: whether the device is there, its status says, if there is one."""
    tier = roster.tier_of(rules.tiers, event.device, event.memory_bytes)
    known = state.devices.get(event.device)
    online = known is None or known.online
    seen = known.seen if known is not None and not online else now
    device = Device(event.device, tier, event.samples, online, seen)
    state = replace(state, devices={**state.devices, event.device: device})
    state, actions = _settle(rules, state, now)
    if state.phase != "open" or state.round is None or any(isinstance(action, Open) for action in actions):
        return state, actions  # opening a round sends every task
    assignment = state.round.assignments.get(event.device)
    if assignment is None or assignment.status != "open":
        return state, actions
    return state, (*actions, SendTask(assignment))


def _seen(state: State, event: DeviceStatus, now: float) -> State:
    known = state.devices.get(event.device)
    if known is None:  # a stranger has no tier before its hello; gone already, it is gone for good
        device = Device(event.device, "", 0, event.online, now if event.online else 0.0)
    elif known.online == event.online:
        return state  # "offline" twice does not restart the grace
    else:
        device = replace(known, online=event.online, seen=now)
    return replace(state, devices={**state.devices, event.device: device})


def _delayed(state: State, seconds: float) -> State:
    """Everything that time was running out for, the grace of devices offline included, gets ``seconds`` more."""
    current = state.round and replace(state.round, deadline=state.round.deadline + seconds)
    devices = {
        name: device if device.online else replace(device, seen=device.seen + seconds)
        for name, device in state.devices.items()
    }
    return replace(state, waiting_since=state.waiting_since + seconds, devices=devices, round=current)


def _answered(state: State, event: Answered) -> State:
    if state.round is None or event.device not in state.round.assignments:
        return state
    assignment = state.round.assignments[event.device]
    if assignment.status != "open":
        return state
    settled = replace(assignment, status="accepted" if event.accepted else "rejected")
    assignments = {**state.round.assignments, event.device: settled}
    return replace(state, round=replace(state.round, assignments=assignments))


def _settle(rules: Rules, state: State, now: float) -> tuple[State, Actions]:
    """Close or open rounds as far as ``state`` and ``now`` allow."""
    actions: Actions = ()
    if state.phase == "open" and state.round is not None:
        state, actions = _maybe_close(rules, state, state.round, now)
    if state.phase == "waiting":
        state, opened = _maybe_open(rules, state, now)
        actions += opened
    return state, actions


def _maybe_close(rules: Rules, state: State, current: OpenRound, now: float) -> tuple[State, Actions]:
    accepted, pending = len(current.with_status("accepted")), len(current.with_status("open"))
    given_up = _given_up_at(rules, state, current)
    until = current.deadline if given_up is None else min(given_up, current.deadline)
    if accepted < current.goal and pending and now < until:
        return state, ()
    if accepted >= max(1, rules.min_reports):
        return replace(state, phase="closing"), (Close(current),)
    why = "the deadline passed" if pending else "every device has answered"
    text = (
        f"round {current.number} is abandoned and the model unchanged: it needs {max(1, rules.min_reports)} reports, "
        f"{accepted} of {len(current.assignments)} devices sent a usable one and {why}; "
        "raise limits.round_deadline_s or lower round.min_reports"
    )
    return _between_rounds(state, current.number, now), (Abandon(current, text),)


def _given_up_at(rules: Rules, state: State, current: OpenRound) -> float | None:
    """When a round with enough reports waits only for devices that have been offline for longer than the grace.

    None while it lacks reports, or one of those it waits for is online. The grace runs from the round's beginning at
    the earliest, which moves with its deadline: after a restart or an outage of the server, devices that were offline
    when it last heard of them have that long to come back.
    """
    if len(current.with_status("accepted")) < max(1, rules.min_reports):
        return None
    began, latest = current.deadline - rules.deadline_s, 0.0
    for assignment in current.with_status("open"):
        device = state.devices.get(assignment.device)
        if device is None or device.online:
            return None
        latest = max(latest, device.seen, began)
    return latest + rules.offline_grace_s


def _between_rounds(state: State, ended: int, now: float) -> State:
    return replace(state, phase="waiting", next_round=ended + 1, waiting_since=now, round=None)


def presence(rules: Rules, state: State, now: float) -> tuple[int, int]:
    """(devices the next round may select, devices it needs to open)."""
    patient = state.next_round == 1 and now < state.waiting_since + rules.ready_timeout_s
    needed = max(1, rules.min_reports, rules.min_devices if patient else 1)
    return len(roster.eligible(state.devices, now, rules.offline_grace_s)), needed


def _maybe_open(rules: Rules, state: State, now: float) -> tuple[State, Actions]:
    if state.next_round > rules.rounds:
        return replace(state, phase="done"), (Finish(),)
    there, needed = presence(rules, state, now)
    if there < needed:
        return state, ()
    opened = _new_round(rules, state, roster.eligible(state.devices, now, rules.offline_grace_s), now)
    return replace(state, phase="open", round=opened), (Open(opened),)


def _new_round(rules: Rules, state: State, names: list[str], now: float) -> OpenRound:
    number, least = state.next_round, max(1, rules.min_reports)
    goal = max(least, roster.share(rules.fraction, len(names)))
    chosen = max(goal, roster.share(rules.fraction * rules.over_selection, len(names)))
    selected = roster.sample(rules.seed, number, names, chosen)
    assignments = {name: _assign(rules, number, state.devices[name]) for name in selected}
    return OpenRound(number, state.model_version, now, now + rules.deadline_s, goal, assignments)


def _assign(rules: Rules, number: int, device: Device) -> Assignment:
    rows = min(device.samples, rules.samples or device.samples, rules.most_samples)
    return Assignment(
        device.name,
        device.tier,
        roster.task_seed(rules.seed, number, device.name),
        roster.task_nonce(rules.run, rules.seed, number, device.name),
        weight_limit=max(1, rows) if rules.weighted else 1,
    )
