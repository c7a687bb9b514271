"""Rounds of a run as a pure state machine: ``step(rules, state, event, now) -> (state, actions)``.

No clock, no random source and no I/O: each event comes with its time, and choices follow from the federation's seed. ::

    waiting --(enough devices)--> open --(goal met, all answered, or deadline)--> closing --ModelReady--> waiting
                                   |                                                                        |
                                   +--(too few reports)--> waiting           (no round left) --> done <-----+

If an algorithm needs every device, a round that lacks one is tried again or ends the run (``Rules.absent``). If a device
declines because it lost its state, the method begins again. Three attempts in a row with refused updates only end the run,
because no later event would change that. Each closed round completes an exchange.

With a buffer (``Rules.buffer``) rounds are asynchronous: :mod:`edgefl_server.coordinator.buffered` decides when one ends
and which devices have tasks; the rest is the same.

:func:`edgefl_server.coordinator.backend.perform` executes the actions in their order.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edgefl_server.coordinator import (
    attendance,
    buffered,
    rollout,
    roster,
    round_texts,
    selection,
    states,
    suspension,
)
from edgefl_server.coordinator.eligibility import unfit
from edgefl_server.coordinator.fleet import Assignments, Devices, Status
from edgefl_server.coordinator.roster import RosterEntry
from edgefl_server.coordinator.round_texts import record_participation
from edgefl_server.coordinator.states import MOST_REFUSED, Actions, OpenRound, Rules, State

_OF_NO_USE = (
    f"{MOST_REFUSED} tries in a row ended for refused updates, and the next would not be better; start over in another "
    "`out` with what the reason asks for, or start the server again with the same `out` to go on trying"
)


_SPOILED = "spoiled the exchange again and again"

_NO_MODEL = (
    f"it failed {MOST_REFUSED} times in a row; change the algorithm's options and start over in another `out`"
)


def initial(model_version: str, now: float) -> State:
    """Return the state of a new run before its first round. ``now``: epoch seconds."""
    return State("waiting", 1, model_version, now)


def step(
    rules: Rules, state: State, event: states.Event, now: float, *, settle: bool = True
) -> tuple[State, Actions]:
    """Return the state after an event, and the actions that follow from it, in the order to perform them. Pure.

    Args:
        rules: Rules of the run.
        state: State before the event.
        event: The event.
        now: Epoch seconds.
        settle: False to only store a hello or a status, in constant time. A later event, such as a Tick, then decides
            whether a round opens or closes.
    """
    match event:
        case states.DeviceHello():
            return _hello(rules, state, event, now, settle=settle)
        case states.DeviceLeft():
            return replace(state, devices=state.devices.without(event.device)), ()
        case states.TrialCounted():
            return replace(state, trial=event.trial), ()
        case states.DeviceStatus() if not settle:
            return _apply_status(state, event, now), ()
        case states.DeviceStatus():
            state = _apply_status(state, event, now)
        case states.Answered() | states.TaskDeclined() | states.TurnLost():
            state = _apply_answer(state, event)
        case states.Answers():
            for each in event.answers:
                state = _apply_answer(state, each)
        case states.Outage():
            state = _delay_deadlines(rules, state, event.seconds)
        case states.Hold():
            state = replace(state, held=event.on)
        case states.ModelReady() if state.phase == "closing" and state.round is not None:
            if event.failed:
                return _fail_round(rules, state, state.round, event, now)
            state = _complete_round(state, state.round, event.model_version, now)
    return _settle(rules, state, now)


def wake_at(rules: Rules, state: State, now: float) -> float | None:
    """Return the epoch second at which the caller should send a Tick event, because time alone may change the state.

    None if only other events can change it.
    """
    if state.phase == "open" and state.round is not None:
        if rules.buffered:
            return buffered.wake_at(rules, state, state.round)
        given_up = attendance.given_up_at(rules.of_round(state.round.number), state, state.round)
        return state.round.deadline if given_up is None else min(given_up, state.round.deadline)
    if state.phase != "waiting" or state.held:
        return None
    return attendance.opens_at(rules.of_round(state.next_round), state, now)


def _hello(
    rules: Rules, state: State, event: states.DeviceHello, now: float, *, settle: bool
) -> tuple[State, Actions]:
    """Store the device of a hello, then settle the round if ``settle`` is True. Return (new state, actions).

    If the device has an open task, it is sent again. A hello is retained and may be old, so the device's last status
    decides whether it is online.
    """
    known = state.devices.get(event.device)
    tier = roster.tier_of(rules.tiers, event.device, event.memory_bytes, known.tier if known else "")
    online = event.online if known is None else known.online
    seen = (
        now if online else known.seen if known is not None else 0.0
    )  # gone before its hello, it is gone for good
    why = unfit(rules.selection, event.conditions)
    device = RosterEntry(event.device, tier, event.samples, online, seen, event.conditions, why)
    state = replace(state, devices=state.devices.with_device(device))
    state, actions = _settle(rules, state, now) if settle else (state, ())
    if (
        state.phase != "open"
        or state.round is None
        or any(isinstance(action, states.StartRound) for action in actions)
    ):
        return state, actions  # opening a round sends every task
    assignment = state.round.assignments.get(event.device)
    if assignment is None or assignment.status != "open" or event.again:
        return state, actions
    if any(isinstance(action, states.ReassignTasks) and assignment in action.tasks for action in actions):
        return state, actions  # a new task is sent anyway
    return state, (*actions, states.SendTask(assignment))


def _apply_status(state: State, event: states.DeviceStatus, now: float) -> State:
    known = state.devices.get(event.device)
    if known is None:
        return state  # a device is unknown before its hello
    if event.for_good:
        return replace(state, devices=state.devices.with_device(roster.gone(known)))
    if known.online == event.online:
        return state  # "offline" twice does not restart the grace
    return replace(state, devices=state.devices.with_device(replace(known, online=event.online, seen=now)))


def _delay_deadlines(rules: Rules, state: State, seconds: float) -> State:
    """Return ``state`` with all deadlines ``seconds`` later. Offline devices may also stay offline that much longer."""
    current = state.round and replace(
        state.round,
        deadline=state.round.deadline + seconds,
        assignments=state.round.assignments.later(seconds) if rules.buffered else state.round.assignments,
    )
    devices = {
        name: device if device.online else replace(device, seen=device.seen + seconds)
        for name, device in state.devices.items()
    }
    return replace(
        state, waiting_since=state.waiting_since + seconds, devices=Devices(devices), round=current
    )


def _apply_answer(state: State, event: states.Answered | states.TaskDeclined | states.TurnLost) -> State:
    task = state.round.assignments.get(event.device) if state.round is not None else None
    if isinstance(event, states.Answered):
        if task is None or event.nonce not in ("", task.nonce):
            return state
        status: Status = "accepted" if event.accepted else "rejected"
        return _with_answer(state, event.device, status=status, reason=event.reason)
    if state.round is None or task is None or task.nonce != event.nonce or state.phase != "open":
        return state
    if isinstance(event, states.TurnLost):
        tasks = state.round.assignments.with_lost_turn(event.device)
        return replace(state, round=replace(state.round, assignments=tasks))
    return _with_answer(state, event.device, status="declined", reason=event.reason)


def _with_answer(state: State, device: str, *, status: Status, reason: str = "") -> State:
    if state.round is None or device not in state.round.assignments.open:
        return state
    tasks = state.round.assignments.with_answer(device, status, reason)
    return replace(state, round=replace(state.round, assignments=tasks))


def _settle(rules: Rules, state: State, now: float) -> tuple[State, Actions]:
    """Close the open round if it is over, then open the next one if enough devices are present.

    Return (new state, actions).
    """
    actions: Actions = ()
    if state.phase == "open" and state.round is not None:
        go_on = _maybe_finish if rules.buffered else _maybe_close
        state, actions = go_on(rules, state, state.round, now)
    if state.phase == "waiting":
        state, opened = _maybe_open(rules, state, now)
        actions += opened
    return state, actions


def _maybe_close(rules: Rules, state: State, current: OpenRound, now: float) -> tuple[State, Actions]:
    accepted, rules = current.count("accepted"), rules.of_round(current.number)
    if current.whole:
        if accepted < current.goal:
            lacking = attendance.find_lacking(rules, state, current, now)
            return _end_incomplete(rules, state, current, lacking, now) if lacking else (state, ())
        return replace(record_participation(state, current, now), phase="closing"), (
            states.CloseRound(current),
        )
    given_up = attendance.given_up_at(rules, state, current)
    until = current.deadline if given_up is None else min(given_up, current.deadline)
    if accepted < current.goal and now < until and current.count("open"):
        return state, ()
    before = state
    if not current.evaluates:  # it decides nothing about who trains
        state = record_participation(suspension.count_strikes(rules, state, current, now), current, now)
    left_out = _warn_suspended(before, state)
    if accepted >= max(1, rules.min_reports):
        closing = (*_warn_incomplete(rules, state, current, now), states.CloseRound(current))
        return replace(state, phase="closing"), (*left_out, *closing)
    after, actions = _end_with_too_few(rules, state, current, now)
    return after, (*left_out, *actions)


def _end_with_too_few(rules: Rules, state: State, current: OpenRound, now: float) -> tuple[State, Actions]:
    """End a round that has fewer than ``min_reports`` updates. Return (new state, actions).

    The round is abandoned, the algorithm begins again, or the run ends.
    """
    if current.evaluates:
        text = round_texts.explain_too_few(rules, current)
        ended = replace(_between_rounds(state, current, now), refused=state.refused, declined=state.declined)
        return ended, (states.AbandonRound(current, text),)
    lost = attendance.without_carry(current)
    if rules.whole and len(lost) == len(current.assignments) and _may_begin_again(rules, current):
        return _begin_again(state, current, lost, now)
    text, refused = round_texts.explain_too_few(rules, current), state.refused
    if current.count("accepted") or current.count("rejected"):
        refused = refused + 1 if round_texts.diverged(current) else 0
    if refused < MOST_REFUSED or not round_texts.all_diverged(current):
        after = replace(
            _between_rounds(state, current, now), refused=refused, declined=round_texts.all_declined(current)
        )
        return after, (states.AbandonRound(current, text),)
    return _refuse_run(state, current, text, round_texts.DIVERGED_RUN, now)


def _maybe_finish(rules: Rules, state: State, current: OpenRound, now: float) -> tuple[State, Actions]:
    """Close an asynchronous round if it has enough updates, else end expired tasks and assign new ones.

    Return (new state, actions). The run ends if training diverged on all devices.
    """
    if current.count("accepted") < current.goal:
        enough = len(current.assignments) >= min(MOST_REFUSED, len(state.devices))
        if enough and not current.count("open") and round_texts.all_diverged(current):
            return _refuse_run(
                state, current, round_texts.explain_too_few(rules, current), round_texts.DIVERGED_RUN, now
            )
        return buffered.continue_round(rules, state, current, now)
    after = record_participation(suspension.count_strikes(rules, state, current, now), current, now)
    return replace(after, phase="closing"), (*_warn_suspended(state, after), states.CloseRound(current))


def _warn_suspended(before: State, after: State) -> Actions:
    """Return a warning about the devices that are suspended in ``after`` but not in ``before``, or no action."""
    suspended = suspension.newly_suspended(before, after)
    if not suspended:
        return ()
    return (states.Warn(round_texts.left_out(suspended)),)


def _warn_incomplete(rules: Rules, state: State, current: OpenRound, now: float) -> Actions:
    """Return a warning that a round closes without some devices although the algorithm needs all, or no action."""
    absent = attendance.find_unreported(rules, state, current, now) if rules.whole else {}
    if not absent:
        return ()
    text = (
        f"round {current.number} goes on without {attendance.format_devices(absent)}: the algorithm needs every device in "
        f"every round, "
        "so the method's guarantees do not hold"
    )
    return (states.Warn(text),)


def _end_incomplete(
    rules: Rules, state: State, current: OpenRound, lacking: dict[str, str], now: float
) -> tuple[State, Actions]:
    """End a round that needs all of its devices but lacks some. Return (new state, actions).

    Depending on the rules the round is tried again, the algorithm begins again, or the run ends. ``lacking``: reason
    by device.
    """
    count, missing = len(current.assignments), attendance.format_devices(lacking)
    text = f"round {current.number} is abandoned and the model unchanged: it needs all {count} devices, and lacks {missing}"
    if rules.absent == "refuse":
        return _refuse_run(state, current, text, round_texts.COME_BACK, now)
    before, state = state, suspension.count_strikes(rules, state, current, now)
    spoilers = suspension.newly_suspended(before, state)
    if spoilers and _may_begin_again(rules, current) and suspension.may_begin_without(rules, state, spoilers):
        after, actions = _begin_again(state, current, tuple(sorted(spoilers)), now, why=_SPOILED)
        return after, (*_warn_suspended(before, state), *actions)
    lost = attendance.without_carry(current)
    if not lost:
        refused = state.refused + 1 if attendance.all_refused(current, lacking) else 0
        if refused == MOST_REFUSED:
            return _refuse_run(state, current, text, _OF_NO_USE, now)
        again = f"{text}; the exchange is tried again as soon as all of them are there"
        return replace(_between_rounds(state, current, now), refused=refused), (
            states.AbandonRound(current, again),
        )
    if _may_begin_again(rules, current):
        return _begin_again(state, current, lost, now)
    remedy = (
        "what they lost cannot be made again, so no round can be completed; start over with another `out`"
    )
    return _refuse_run(state, current, text, remedy, now)


def _may_begin_again(rules: Rules, current: OpenRound) -> bool:
    """Return True if the algorithm can start again, so that devices compute the state that they lost anew."""
    return rules.opening > 0 and current.position > 0


def _begin_again(
    state: State, current: OpenRound, lost: tuple[str, ...], now: float, why: str = ""
) -> tuple[State, Actions]:
    names, whose = ", ".join(lost), "has lost what it" if len(lost) == 1 else "have lost what they"
    why = why or f"{whose} kept" + (f" of round {state.base}" if state.base else "")
    text = (
        f"{names} {why}: round {current.number} is abandoned, and the method begins again from the current "
        "model, with its opening exchange and whatever devices are there"
    )
    after = replace(_between_rounds(state, current, now), position=0, members=())
    return after, (states.AbandonRound(current, text, restart=True), states.Warn(text))


def _refuse_run(
    state: State, current: OpenRound, text: str, remedy: str, now: float
) -> tuple[State, Actions]:
    ended = replace(_between_rounds(state, current, now), phase="done")
    return ended, (
        states.AbandonRound(current, text),
        states.RefuseRun(f"{text}; {remedy}", round_texts.all_diverged(current)),
    )


def _complete_round(state: State, current: OpenRound, model_version: str, now: float) -> State:
    if current.evaluates:
        ended = replace(_between_rounds(state, current, now), model_version=model_version)
        return replace(ended, refused=state.refused, declined=state.declined)
    ended = replace(_between_rounds(state, current, now), model_version=model_version, base=current.number)
    return replace(ended, position=state.position + 1)


def _fail_round(
    rules: Rules, state: State, current: OpenRound, ready: states.ModelReady, now: float
) -> tuple[State, Actions]:
    """Continue after a round whose server step gave no usable model: schedule the next round, or end the run.

    Return (new state, actions). The third failure in a row ends the run. A round that the rollback rule undid does not
    count, because malicious updates must not be able to end the run.
    """
    after = replace(_between_rounds(state, current, now), refused=0 if ready.undone else state.refused + 1)
    if after.refused == MOST_REFUSED:
        return replace(after, phase="done"), (states.RefuseRun(f"{ready.failed}; {_NO_MODEL}"),)
    return _settle(rules, after, now)


def _between_rounds(state: State, ended: OpenRound, now: float) -> State:
    after = replace(
        state,
        phase="waiting",
        next_round=ended.number + 1,
        waiting_since=now,
        round=None,
        refused=0,
        declined={},
    )
    # Open tasks of an asynchronous round continue in the next one.
    versions = {**ended.older, ended.number: states.Version(ended.model_version, ended.position)}
    open_tasks = Assignments(dict(ended.assignments.open)) if ended.buffered else state.carried
    return replace(after, carried=open_tasks, versions=versions if ended.buffered else {})


def _maybe_open(rules: Rules, state: State, now: float) -> tuple[State, Actions]:
    if state.next_round > rules.last_round:
        done = replace(state, phase="done")
        if (rules.whole and 0 < state.position <= rules.opening) or (rules.rounds and not state.base):
            return done, (
                round_texts.refuse_untrained(rules, diverged=state.refused > 0, declined=state.declined),
            )
        return done, (states.FinishRun(),)
    if state.held:
        return state, ()
    rules = rules.of_round(state.next_round)
    there = attendance.presence(rules, state, now)
    if there.known < there.needed and not state.carried.open:
        gone = attendance.find_gone(rules, state, now)
        return (replace(state, phase="done"), (round_texts.lost(state, gone),)) if gone else (state, ())
    if rules.buffered:
        return buffered.open_round(rules, state, now)
    names = attendance.candidates(rules, state, now)
    evaluates = rules.is_evaluation(state.next_round)
    if rules.rollout is not None and state.trial is None and not evaluates:
        state = replace(
            state, trial=rollout.begin_trial(rules.rollout, state.next_round, state.devices, names)
        )
    opened = (_new_evaluation if evaluates else _new_round)(rules, state, names, now)
    members = tuple(names) if rules.all_needed else ()
    members = state.members if evaluates else members
    return replace(state, phase="open", round=opened, members=members), (states.StartRound(opened),)


def _new_round(rules: Rules, state: State, names: list[str], now: float) -> OpenRound:
    number = state.next_round
    goal, selected = len(names), names
    if not rules.all_needed:
        goal, selected = selection.goal_of(rules, len(names)), selection.select_devices(rules, state, names)
    assignments = {name: selection.assign(rules, state, number, state.devices[name]) for name in selected}
    return OpenRound(
        number,
        state.model_version,
        now,
        now + rules.deadline_s,
        goal,
        Assignments(assignments),
        state.position,
        rules.all_needed,
    )


def _new_evaluation(rules: Rules, state: State, names: list[str], now: float) -> OpenRound:
    """Return a round in which a random sample of ``names`` evaluates the model, or measures statistics for that.

    Candidates of a rollout have no part.
    """
    number = state.next_round
    position = rules.evaluation.position(number, rules.rounds)
    goal = min(rules.evaluation.devices or len(names), len(names))
    count = min(len(names), math.ceil(goal * rules.over_selection - 1e-9))
    selected = roster.sample(rules.seed, number, names, count)
    if position == states.MEASURING:  # each tier evaluates with statistics of its own
        drawn = {state.devices[name].tier for name in selected}
        for tier in sorted({state.devices[name].tier for name in names} - drawn):
            own = [name for name in names if state.devices[name].tier == tier]
            selected, goal = sorted([*selected, *roster.sample(rules.seed, number, own, 1)]), goal + 1
    plain, counted = replace(state, trial=None), replace(rules, weighted=True)
    return OpenRound(
        number,
        state.model_version,
        now,
        now + rules.deadline_s,
        goal,
        Assignments(
            {name: selection.assign(counted, plain, number, state.devices[name]) for name in selected}
        ),
        position,
    )
