"""What devices are told of their updates."""

from __future__ import annotations

from edgefl.errors import UpdateRejected
from edgefl.wire.mqtt.messages import Ack, UpdateChunk
from edgefl.wire.text import printable
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.states import Rules

MOST_TEXT = 1000


def over(status: str, number: int, rules: Rules) -> UpdateRejected | None:
    """Why the update of a task is not taken that ended in this way without one."""
    match status:
        case "stale":
            text = f"more than {rules.max_staleness} versions came since (round.max_staleness)"
        case "expired":
            text = f"it took longer than {rules.deadline_s:g} s (limits.round_deadline_s), or its device was away too long"
        case _:
            return None
    return UpdateRejected(
        status, f"the task of round {number} is over: {text}; take the next one", round=number
    )


def refusal_of(number: int, chunk: UpdateChunk, refusal: UpdateRejected) -> Ack:
    """That an update is refused, of which ``chunk`` came."""
    text = printable(refusal.message, MOST_TEXT)
    return Ack(
        round=number,
        nonce=chunk.nonce[:64],
        status="rejected",
        reason=refusal.reason,
        text=text,
        sha256=chunk.sha256[:64],
    )


def request_for(number: int, chunk: UpdateChunk, missing: list[int], text: str = "") -> Ack:
    """The pieces that are ``missing`` of an update, of which ``chunk`` came."""
    return Ack(
        round=number, nonce=chunk.nonce, status="missing", missing=missing, text=text, sha256=chunk.sha256
    )


def word_on_answered(
    assignment: Assignment, number: int, chunk: UpdateChunk, accepted: str, rules: Rules
) -> Ack:
    """On an update for a task that is answered, of which ``chunk`` came: good news only for the very update that was
    ``accepted``, by its digest."""
    nonce, sha256 = assignment.nonce, chunk.sha256[:64]
    reason, text = (
        "already-rejected",
        f"the update for round {number} has been refused already; wait for the next round",
    )
    if (ended := over(assignment.status, number, rules)) is not None:
        reason, text = ended.reason, ended.message
    if assignment.status == "accepted":
        if accepted == chunk.sha256:
            return good_news(number, chunk)
        reason = "other-update"
        text = f"another update ({accepted[:12]}) was accepted for this task: who has this device's name and key?"
    return Ack(round=number, nonce=nonce, status="rejected", reason=reason, text=text, sha256=sha256)


def good_news(number: int, copied: UpdateChunk) -> Ack:
    """Once more that an update was accepted, of which a copy came."""
    return Ack(round=number, nonce=copied.nonce, status="accepted", sha256=copied.sha256)


def is_edge(chunk: UpdateChunk) -> bool:
    """Whether it is the first or the last of its update: those that are answered."""
    return chunk.index in (0, chunk.count - 1)
