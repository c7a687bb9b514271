"""From a chunk on a topic to an update in the journal and in the sum: assemble, judge, check, journal, acknowledge, add."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgefl.submodels.submodel import Placement
from edgefl.wire import tensors
from edgefl.wire.errors import ProtocolError, UpdateRejected
from edgefl.wire.limits import Limits
from edgefl.wire.messages import Ack, Update, UpdateChunk, decode
from server.aggregator import Aggregator, Checked
from server.assembly import LEAST_PIECE, Assembly, Complete, Missing
from server.claims import Claim, addressed, weigh
from server.coordinator import Answered, Assignment, Rules, State
from server.events import DeviceSeen, Event, Rejected
from server.journal import Journal

_MOST_METRICS = 64
_MOST_TEXT = 1000


@dataclass(frozen=True)
class Verdict:
    """What a chunk led to: a word for the device, and news for the coordinator."""

    ack: Ack | None = None
    answered: Answered | None = None


class Intake:
    """Takes the updates of one run. Nothing is acknowledged as accepted before the journal has it."""

    def __init__(
        self,
        rules: Rules,
        placements: Callable[[], Mapping[str, Placement]],
        journal: Journal,
        limits: Limits,
        emit: Callable[[Event], None],
    ) -> None:
        self._rules = rules
        self._placements = placements
        self._journal = journal
        self._emit = emit
        self._assembly = Assembly(
            update_bytes=limits.max_update_bytes,
            most_bytes=limits.max_pending_bytes,
            least_piece=min(LEAST_PIECE, limits.chunk_bytes // 2),
        )

    def forget_unfinished(self) -> None:
        """The round is over: what is not whole will not be."""
        self._assembly.clear()

    def take(
        self, device: str, number: int, chunk: UpdateChunk, state: State, aggregator: Aggregator | None
    ) -> Verdict:
        """Take one chunk of ``device``'s update for round ``number``.

        An answer that needs no assembling (a second copy, a closed round) is given at the first chunk, so that the
        device may save the rest, and again at the last.
        """
        try:
            assignment = addressed(state, device, number, chunk.nonce)
        except UpdateRejected as refusal:
            return self._stray(device, number, chunk, refusal, state) if _edge(chunk) else Verdict()
        if assignment.status != "open" or aggregator is None:
            return Verdict(_repeated(assignment, number)) if _edge(chunk) else Verdict()
        try:
            piece = self._assembly.add(device, chunk)
            if piece is None:
                return Verdict()
            if isinstance(piece, Missing):
                ack = Ack(round=number, nonce=chunk.nonce, status="missing", missing=piece.indices)
                return Verdict(ack)
            return self._accept(assignment, number, piece, state, aggregator)
        except UpdateRejected as refusal:
            self._assembly.drop(device)
            return self._refuse(device, number, chunk, refusal, final=True, recorded=number)

    def _accept(
        self, assignment: Assignment, number: int, whole: Complete, state: State, aggregator: Aggregator
    ) -> Verdict:
        update = _decoded(whole.data)
        if update.device != assignment.device:
            raise UpdateRejected(
                "wrong-device",
                f"the update came from {assignment.device} and says it is from {update.device[:64]!r}; "
                "send each update under the device's own topic",
                device=assignment.device,
            )
        claim = Claim(
            assignment.device,
            update.run,
            update.round,
            update.nonce,
            update.tier,
            update.model_version,
            update.samples,
        )
        weight = weigh(self._rules, state, claim)
        checked = self._checked(update, aggregator)
        self._journal.accept(
            self._rules.run,
            number,
            assignment,
            sha256=whole.sha256,
            weight=weight,
            metrics=_finite(update.metrics),
            sizes=(update.profile.down_bytes, len(whole.data)),
            data=whole.data,
        )
        aggregator.add(checked, weight)
        self._emit(_report(update, len(whole.data)))
        ack = Ack(round=number, nonce=assignment.nonce, status="accepted")
        return Verdict(ack, Answered(assignment.device, accepted=True))

    def replay(self, number: int, aggregator: Aggregator) -> None:
        """Add what the journal holds of a round that another process began."""
        for stored in self._journal.accepted(self._rules.run, number):
            update = _decoded(stored.data)
            aggregator.add(self._checked(update, aggregator), stored.weight)

    def _checked(self, update: Update, aggregator: Aggregator) -> Checked:
        try:
            arrays = tensors.load(update.tensors, max_bits=0)  # an update has no masks to unfold
        except ProtocolError as error:
            raise UpdateRejected("malformed", error.message) from error
        return aggregator.check(arrays, self._placements()[update.tier].regions)

    def _stray(
        self, device: str, number: int, chunk: UpdateChunk, refusal: UpdateRejected, state: State
    ) -> Verdict:
        """An update for no open assignment: a late second copy of an accepted one is still good news.

        One for a round that has not begun is recorded with the next: only rounds that exist have records.
        """
        if self._journal.was_accepted(self._rules.run, number, device, chunk.nonce):
            return Verdict(Ack(round=number, nonce=chunk.nonce, status="accepted"))
        recorded = min(number, state.next_round)
        return self._refuse(device, number, chunk, refusal, final=False, recorded=recorded)

    def _refuse(
        self,
        device: str,
        number: int,
        chunk: UpdateChunk,
        refusal: UpdateRejected,
        *,
        final: bool,
        recorded: int,
    ) -> Verdict:
        reason, text = refusal.reason, refusal.message[:_MOST_TEXT]
        key = hashlib.sha256(
            f"{number}/{chunk.nonce}/{chunk.sha256}".encode()
        ).hexdigest()  # bounded, whatever was sent
        if self._journal.reject(self._rules.run, recorded, device, key[:24], key, reason, text, final=final):
            self._emit(Rejected(device=device, round=number, reason=reason, text=text))
        ack = Ack(round=number, nonce=chunk.nonce[:64], status="rejected", reason=reason, text=text)
        return Verdict(ack, Answered(device, accepted=False) if final else None)


def _edge(chunk: UpdateChunk) -> bool:
    return chunk.index in (0, chunk.count - 1)


def _repeated(assignment: Assignment, number: int) -> Ack:
    if assignment.status == "accepted":
        return Ack(round=number, nonce=assignment.nonce, status="accepted")
    text = f"the update for round {number} has been refused already; wait for the next round"
    return Ack(round=number, nonce=assignment.nonce, status="rejected", reason="already-rejected", text=text)


def _decoded(data: bytes) -> Update:
    try:
        return decode(Update, data)
    except ProtocolError as error:
        raise UpdateRejected("malformed", error.message) from error


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    names = sorted(name for name, value in metrics.items() if math.isfinite(value))
    return {name[:64]: float(metrics[name]) for name in names[:_MOST_METRICS]}


def _report(update: Update, up_bytes: int) -> DeviceSeen:
    return DeviceSeen(
        device=update.device,
        tier=update.tier,
        round=update.round,
        stage="reported",
        loss=update.metrics.get("loss", float("nan")),
        step_ms=update.profile.step_ms,
        peak_bytes=update.profile.peak_bytes,
        down_bytes=update.profile.down_bytes,
        up_bytes=up_bytes,
        idle_bytes=update.profile.idle_bytes,
        forward_ms=update.profile.forward_ms,
    )
