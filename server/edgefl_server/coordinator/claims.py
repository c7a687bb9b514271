"""Whether an update is what its device was asked for. Pure functions over the coordinator's state."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from edgefl.errors import UpdateRejected
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.states import OpenRound, Rules, State


@dataclass(frozen=True)
class Claim:
    """What an update says about itself."""

    device: str
    run: str
    round: int
    nonce: str
    tier: str
    model_version: str
    samples: int


def addressed(state: State, device: str, round_number: int, nonce: str) -> Assignment:
    """The assignment a piece of an update answers (any status); UpdateRejected if there is none."""
    if device not in state.devices:
        raise UpdateRejected(
            "unknown-device", f"device {device} has not said hello; connect again", device=device
        )
    current = state.round if state.phase == "open" else None
    if current is None or not current.version_of(round_number):
        what = f"round {current.number} is open" if current else "no round is open"
        raise UpdateRejected(
            "closed-round",
            f"round {round_number} takes no updates, {what}; drop the update",
            round=round_number,
        )
    assignment = current.assignments.get(device)
    if assignment is None:
        raise UpdateRejected(
            "not-selected",
            f"device {device} has no task in round {round_number}; drop the update",
            device=device,
        )
    if assignment.nonce != nonce or assignment.round != round_number:
        raise UpdateRejected(
            "wrong-nonce",
            f"the task of device {device} in round {round_number} has nonce {assignment.nonce}, found {nonce[:64]}; "
            "drop the update",
            nonce=nonce[:64],
        )
    return assignment


def weight_cap(rules: Rules, opened: OpenRound) -> int:
    """The most that one update of the round weighs, whatever its device claims: ``rules.weight_cap`` times the median of
    what its devices claimed when it opened.

    Where versions wait for nobody, that is settled as one opens, whoever comes and goes meanwhile.

    The median is that of the honest ones, or close to it, while these are more than half of them. Of an even number it is
    the lower one of the two in the middle: one device of two does not say how much the other may claim.
    """
    if opened.weight_cap:
        return opened.weight_cap
    claimed = [assignment.weight_limit for assignment in opened.assignments.values()]
    if not rules.weighted or not rules.weight_cap or not claimed:
        return max(claimed, default=1)
    return max(1, math.floor(rules.weight_cap * statistics.median_low(claimed)))


def weigh(rules: Rules, state: State, claim: Claim) -> int:
    """The weight that a whole update claims; UpdateRejected if its claims differ from the device's assignment."""
    assignment = addressed(state, claim.device, claim.round, claim.nonce)
    return weight_of(rules, assignment, state.round.version_of(claim.round) if state.round else "", claim)


def weight_of(rules: Rules, assignment: Assignment, model_version: str, claim: Claim) -> int:
    """The same for who is known to have this assignment in a round that begins from ``model_version``."""
    for reason, what, expected, actual in (
        ("wrong-run", "run", rules.run, claim.run),
        ("wrong-tier", "tier", assignment.tier, claim.tier),
        ("wrong-model", "model version", model_version, claim.model_version),
    ):
        if expected != actual:
            raise UpdateRejected(
                reason,
                f"the update should be of {what} {expected[:16]!r}, found {actual[:16]!r}; "
                f"take the task of round {claim.round} as it was given",
                expected=expected,
                found=actual[:64],
            )
    if not rules.weighted:
        return 1
    if claim.samples < 1 or min(claim.samples, rules.most_samples) > assignment.weight_limit:
        raise UpdateRejected(
            "wrong-samples",
            f"the update claims {claim.samples} samples, the device has {assignment.weight_limit} by its hello; "
            "say hello again when local data change",
            samples=claim.samples,
        )
    return min(claim.samples, assignment.weight_limit)
