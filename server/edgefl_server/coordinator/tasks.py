"""A device's part in a round, as it is given. Pure functions."""

from __future__ import annotations

from edgefl_server.coordinator import rollout, roster
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.roster import Device
from edgefl_server.coordinator.states import Rules, State


def assigned(
    rules: Rules, state: State, number: int, device: Device, *, turn: int = 0, until: float = 0.0
) -> Assignment:
    """The task of ``device`` that begins from round ``number``'s model; ``turn`` tells apart those of one device."""
    rows = min(device.samples, rules.samples or device.samples, rules.most_samples)
    return Assignment(
        device.name,
        rollout.tier_for(rules.rollout, state.trial, device),
        roster.task_seed(rules.seed, number, device.name, turn),
        roster.task_nonce(rules.run, rules.seed, number, device.name, turn),
        weight_limit=max(1, rows) if rules.weighted else 1,
        round=number,
        until=until,
    )
