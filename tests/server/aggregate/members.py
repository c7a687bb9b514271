"""An algorithm that needs every device, three of which begin with it; and what may happen to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import strategies as st

from edgefl.wire.mqtt.messages import NO_CARRY
from edgefl_server.coordinator import machine, states
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import CloseRound, ModelReady, Rules, State

NAMES = ("a", "b", "c")
RULES = Rules(
    run="run",
    seed=3,
    rounds=6,
    tiers=(TierRule("all", ("[a-f]",)),),
    min_devices=3,
    deadline_s=100,
    ready_timeout_s=20,
    offline_grace_s=5,
    whole=True,
    opening=1,
)
VERSION = "v" * 64


def play(rules: Rules, state: State, *events: Any, now: float = 1.0) -> tuple[State, list[Any]]:
    """Feed events; a round that closes gets its model at once."""
    done: list[Any] = []
    for event in events:
        state, actions = machine.step(rules, state, event, now)
        done += actions
        if any(isinstance(action, CloseRound) for action in actions):
            state, actions = machine.step(rules, state, ModelReady(VERSION), now)
            done += actions
    return state, done


def hello(*names: str) -> list[states.Event]:
    return [states.DeviceHello(name, 8, 50) for name in names]


def accepted(*names: str) -> list[states.Event]:
    return [states.Answered(name, True) for name in names]


def decline(state: State, name: str, reason: str = NO_CARRY) -> states.TaskDeclined:
    assert state.round is not None
    return states.TaskDeclined(name, state.round.assignments[name].nonce, reason)


def left(*names: str) -> list[states.Event]:
    return [states.DeviceStatus(name, online=False) for name in names]


def back(*names: str) -> list[states.Event]:
    return [states.DeviceStatus(name, online=True) for name in names]


def begun(position: int = 0, **changes: Any) -> tuple[Rules, State]:
    """An open round of all three devices after ``position`` completed exchanges."""
    rules = replace(RULES, **changes)
    state, _ = play(rules, machine.initial(VERSION, 0.0), *hello(*NAMES), now=0.0)
    for _ in range(position):
        state, _ = play(rules, state, *accepted(*NAMES), now=0.0)
    assert state.phase == "open" and state.position == position
    return rules, state


def kinds(actions: list[Any]) -> list[type]:
    return [type(action) for action in actions]


DEVICES = st.sampled_from("abcd")
EVERYONE = states.Answered("everyone", True)
EVENTS = st.lists(
    st.one_of(
        *[st.just(EVERYONE)] * 3,
        st.builds(states.DeviceHello, DEVICES, st.just(8), st.just(50)),
        st.builds(states.DeviceStatus, DEVICES, st.sampled_from([True, True, False])),
        st.builds(states.Answered, DEVICES, st.sampled_from([True, True, True, False])),
        st.builds(
            states.TaskDeclined, DEVICES, st.just("now"), st.sampled_from([NO_CARRY, NO_CARRY, "busy"])
        ),
        st.just(states.Tick()),
        st.builds(states.Outage, st.floats(0, 5)),
    ),
    min_size=5,
    max_size=60,
).map(lambda events: [*hello(*NAMES), EVERYONE, *events])


def addressed(state: State, event: Any) -> list[Any]:
    """A decline gets the nonce of the device's task; everyone is whoever has a task that is open."""
    if state.round is None:
        return [event]
    if event == EVERYONE:
        return accepted(*(each.device for each in state.round.with_status("open")))
    task = state.round.assignments.get(event.device) if isinstance(event, states.TaskDeclined) else None
    return [msgspec.structs.replace(event, nonce=task.nonce) if task else event]
