"""Comparison of an update's claims with the task of its device. Pure functions over the coordinator's state."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from edgefl.errors import UpdateRejected
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.states import OpenRound, Rules, State


@dataclass(frozen=True)
class UpdateClaim:
    """Fields of a received update that have to agree with its device's task."""

    device: str
    run: str
    round: int
    nonce: str
    tier: str
    model_version: str
    samples: int


def find_task(state: State, device: str, round_number: int, nonce: str) -> Assignment:
    """Return the task that a chunk answers; it may be open or not.

    Args:
        state: State of the coordinator.
        device: Device that sent the chunk.
        round_number: Round in the topic.
        nonce: Nonce of the chunk.

    Raises:
        UpdateRejected: If the device has no such task.
    """
    if device not in state.devices:
        raise UpdateRejected("unknown-device", f"device {device} sent no hello; connect again", device=device)
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
    """Return the largest weight that one update of the round can have, whatever its device claims; at least 1.

    It is ``rules.weight_cap`` times the median of the tasks' weight limits. While more than half of the devices are
    honest, the median is an honest claim, or close to one. For an even number the lower median is used, so that one
    device of two cannot raise the cap. In asynchronous rounds the cap is fixed when the round opens. Without weights
    or without a cap it is the largest weight limit.
    """
    if opened.weight_cap:
        return opened.weight_cap
    claimed = [assignment.weight_limit for assignment in opened.assignments.values()]
    if not rules.weighted or not rules.weight_cap or not claimed:
        return max(claimed, default=1)
    return max(1, math.floor(rules.weight_cap * statistics.median_low(claimed)))


def weigh(rules: Rules, state: State, claim: UpdateClaim) -> int:
    """Return the weight that an update claims: its number of samples up to a limit; 1 if updates are not weighted.

    Raises:
        UpdateRejected: If the device has no such task, or if the claims differ from its task.
    """
    assignment = find_task(state, claim.device, claim.round, claim.nonce)
    return weight_of(rules, assignment, state.round.version_of(claim.round) if state.round else "", claim)


def weight_of(rules: Rules, assignment: Assignment, model_version: str, claim: UpdateClaim) -> int:
    """Return the weight that an update claims: its number of samples up to the task's limit; 1 if updates are not
    weighted. The number of rows of an evaluation is checked in both cases.

    Args:
        rules: Rules of the run.
        assignment: Task that the update answers.
        model_version: Model that the task begins from.
        claim: Claims of the update.

    Raises:
        UpdateRejected: If run, tier, model version or number of samples differ from the task.
    """
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
    if not rules.weighted and not rules.is_evaluation(assignment.round):
        return 1
    if claim.samples < 1 or min(claim.samples, rules.most_samples) > assignment.weight_limit:
        raise UpdateRejected(
            "wrong-samples",
            f"the update claims {claim.samples} samples, the device has {assignment.weight_limit} by its hello; "
            "say hello again when local data change",
            samples=claim.samples,
        )
    return min(claim.samples, assignment.weight_limit)
