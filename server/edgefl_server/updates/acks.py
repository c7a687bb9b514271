"""Acknowledgements of updates: accepted, rejected, or a request for missing chunks."""

from __future__ import annotations

from edgefl.errors import UpdateRejected
from edgefl.wire.mqtt.messages import Ack, UpdateChunk
from edgefl.wire.text import printable
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.states import Rules

MAX_TEXT = 1000
"""Characters of a refusal's text."""


def accepted(number: int, chunk: UpdateChunk) -> Ack:
    """Return the acknowledgement that the update of ``chunk`` was accepted. ``number`` is the round in its topic."""
    return Ack(round=number, nonce=chunk.nonce, status="accepted", sha256=chunk.sha256)


def rejected(number: int, chunk: UpdateChunk, refusal: UpdateRejected) -> Ack:
    """Return the acknowledgement that refuses the update of ``chunk``. ``number`` is the round in its topic.

    The nonce and the digest, which a device may send at any length, and the message of ``refusal`` are cut.
    """
    return Ack(
        round=number,
        nonce=chunk.nonce[:64],
        status="rejected",
        reason=refusal.reason,
        text=printable(refusal.message, MAX_TEXT),
        sha256=chunk.sha256[:64],
    )


def missing(number: int, chunk: UpdateChunk, indices: list[int], text: str = "") -> Ack:
    """Return the acknowledgement that requests the chunks ``indices`` of the update of ``chunk`` from its device.

    ``number`` is the round in its topic. ``text`` describes the damage if the complete update had another digest.
    """
    return Ack(
        round=number, nonce=chunk.nonce, status="missing", missing=indices, text=text, sha256=chunk.sha256
    )


def already_answered(
    assignment: Assignment, number: int, chunk: UpdateChunk, accepted_sha256: str, rules: Rules
) -> Ack:
    """Return the acknowledgement of an update for a task that is not open any more.

    It is ``accepted`` again if the chunk belongs to the accepted update itself, else a refusal with the reason.

    Args:
        assignment: The task.
        number: Round in the topic.
        chunk: Chunk of the update.
        accepted_sha256: Digest of the update that was accepted for the task, or empty.
        rules: Rules of the run.
    """
    if assignment.status == "accepted" and accepted_sha256 == chunk.sha256:
        return accepted(number, chunk)
    refusal = task_over(assignment.status, number, rules)
    if assignment.status == "accepted":
        refusal = UpdateRejected(
            "other-update",
            f"another update ({accepted_sha256[:12]}) was accepted for this task: "
            "who has this device's name and key?",
        )
    elif refusal is None:
        refusal = UpdateRejected(
            "already-rejected",
            f"the update for round {number} has been refused already; wait for the next round",
        )
    return rejected(number, chunk, refusal)


def task_over(status: str, number: int, rules: Rules) -> UpdateRejected | None:
    """Return the refusal of an update whose task in round ``number`` has the ``status`` expired or stale.

    None for any other status.
    """
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
