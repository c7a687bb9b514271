"""Receiver of updates: from a chunk on a topic to an update in the journal and in the sums of its round.

Server and workers use the same receiver. A chunk passes the rate limit, reassembly and validation. A complete update
waits in a batch for the journal; then it is added to the sums and acknowledged.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from edgefl.codecs.growth import runaway_warning
from edgefl.errors import StoreError, UpdateRejected
from edgefl.system.memory import most_bytes
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Ack, Update, UpdateChunk
from edgefl.wire.mqtt.topics import PublishTraffic
from edgefl_server.aggregate.aggregator import CheckedArrays
from edgefl_server.coordinator.claims import UpdateClaim, find_task, weigh
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.states import Answered, OpenRound, Rules, State, TurnLost
from edgefl_server.events import EventListener, Rejected, UpdateAccepted, Warned
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.round_table import RoundOver
from edgefl_server.storage.update_table import AcceptedUpdate
from edgefl_server.updates import acks, validation
from edgefl_server.updates.rate_limit import RateLimiter
from edgefl_server.updates.reassembly import (
    MIN_CHUNK_BYTES,
    ChunkReassembler,
    MissingChunks,
    ReassembledUpdate,
)
from edgefl_server.updates.upload_scheduler import UploadScheduler

BATCH_UPDATES = 64
BATCH_BYTES = 4 << 20
BATCH_S = 0.05
"""Limits of a batch: it is journaled when it has that many updates or bytes, or when its first update has waited that
long."""
_ENVELOPE_FACTOR = 4
"""Size of the smallest chunks' messages as a multiple of their data."""
MAX_ROUNDS = 2**31
"""Upper limit of round numbers in topics."""
_NONCE = re.compile(r"[0-9a-f]{24}")


@dataclass(frozen=True)
class Reply:
    """Acknowledgement ``ack`` to send to device ``device``."""

    device: str
    ack: Ack


@dataclass(frozen=True)
class ReceiveResult:
    """Result of received chunks.

    Attributes:
        replies: Acknowledgements to send to devices.
        answers: Events for the coordinator.
    """

    replies: tuple[Reply, ...] = ()
    answers: tuple[Answered | TurnLost, ...] = ()


_NOTHING = ReceiveResult()


@dataclass
class UploadRecord:
    """State of one device's upload.

    Attributes:
        traffic: Messages since the device's last report that the journal does not have yet.
        sent_bytes: Bytes of messages with new chunks of the update for the current task.
        accepted: (round, nonce, digest) of the device's last accepted update; None before the first.
    """

    traffic: PublishTraffic = field(default_factory=PublishTraffic)
    sent_bytes: int = 0
    accepted: tuple[int, str, str] | None = None


@dataclass(frozen=True, slots=True)
class _ValidUpdate:
    """Validated update that waits for the journal.

    Attributes:
        row: Its row for the journal.
        message: The decoded message.
        checked: Its arrays for the sums.
    """

    row: AcceptedUpdate
    message: Update
    checked: CheckedArrays

    @property
    def device(self) -> str:
        return self.row.assignment.device


class UpdateReceiver:
    """Receiver of one run's updates, from chunks on topics to the journal and the sums of a round.

    Call :meth:`flush` when :meth:`due_in` returns 0, and before any event that may close the round. Call
    :meth:`request_uploads` after both.

    Args:
        rules: Rules of the run.
        journal: Journal of accepted and refused updates.
        limits: Limits of the federation, or a worker's share of them.
        events: Sink of events for people.
        rate_limiter: Limits of answers.
        scheduler: Order of uploads that do not fit into memory together.
    """

    def __init__(
        self,
        rules: Rules,
        journal: Journal,
        limits: Limits,
        events: EventListener,
        rate_limiter: RateLimiter,
        scheduler: UploadScheduler,
    ) -> None:
        self._rules = rules
        self._journal = journal
        self._limits = limits
        self._events = events
        self._rate_limiter = rate_limiter
        self._scheduler = scheduler
        self._reassembler = ChunkReassembler(
            max_update_bytes=limits.max_update_bytes,
            max_bytes=min(limits.max_pending_bytes, most_bytes() // 4 or limits.max_pending_bytes),
            min_chunk_bytes=min(MIN_CHUNK_BYTES, limits.chunk_bytes // 2),
        )
        self._uploads: dict[str, UploadRecord] = {}
        self._batch: dict[str, _ValidUpdate] = {}
        self._batch_bytes = 0
        self._batch_since = 0.0
        self._warned_tiers: set[str] = set()

    @property
    def held_bytes(self) -> int:
        """Memory of unfinished updates in bytes."""
        return self._reassembler.held_bytes

    @property
    def dropped(self) -> int:
        """Number of unfinished updates that were dropped because memory was short."""
        return self._reassembler.dropped

    @property
    def has_batch(self) -> bool:
        """True if :meth:`flush` has updates to write."""
        return bool(self._batch)

    def due_in(self, state: State) -> float | None:
        """Return the seconds until :meth:`flush` and :meth:`request_uploads` should be called; None if there is
        nothing to do.

        Args:
            state: State of the coordinator. If the batch reaches the round's goal, it is due at once.
        """
        if self._batch:
            opened = state.round
            if opened is not None and opened.count("accepted") + len(self._batch) >= opened.goal:
                return 0.0
            if len(self._batch) >= BATCH_UPDATES or self._batch_bytes >= BATCH_BYTES:
                return 0.0
        turn = self._scheduler.due_in()
        if not self._batch:
            return turn
        batch = max(0.0, self._batch_since + BATCH_S - time.monotonic())
        return batch if turn is None else min(batch, turn)

    # -- chunks ----------------------------------------------------------------------------------------------

    def receive(
        self,
        device: str,
        number: int,
        chunk: UpdateChunk,
        traffic: PublishTraffic,
        state: State,
        aggregation: RoundAggregation | None,
    ) -> ReceiveResult:
        """Receive one chunk of an update.

        Args:
            device: Device that sent it; its signature was verified.
            number: Round in the topic.
            chunk: The chunk, or an offer without data.
            traffic: Size of its message.
            state: State of the coordinator.
            aggregation: Round that receives updates, or None.

        Returns:
            Replies and answers that follow at once. A complete valid update has none before :meth:`flush`.

        Raises:
            StoreError: If a refusal cannot be journaled.
        """
        upload = self._uploads.get(device)
        if upload is None:
            upload = UploadRecord()
            if device in state.devices:  # names without a hello must not fill the memory
                self._uploads[device] = upload
        upload.traffic += traffic
        if device in self._batch:
            return _NOTHING  # flush answers in a moment

        # An update that needs no reassembly is answered at its first chunk, so that the device can save the others, and
        # again at its last, because the first answer may be lost.
        is_edge = chunk.index in (0, chunk.count - 1)
        if upload.accepted == (number, chunk.nonce, chunk.sha256):
            is_answered = is_edge and self._rate_limiter.allow("copy", device)
            return ReceiveResult((Reply(device, acks.accepted(number, chunk)),)) if is_answered else _NOTHING
        try:
            assignment = find_task(state, device, number, chunk.nonce)
        except UpdateRejected as refusal:
            return self._answer_unrequested(device, number, chunk, refusal, state) if is_edge else _NOTHING
        if assignment.status != "open":
            is_answered = is_edge and self._rate_limiter.allow("answer", device)
            return self._answer_again(assignment, number, chunk) if is_answered else _NOTHING
        if aggregation is None:
            return _NOTHING
        return self._receive_for_task(assignment, chunk, traffic, upload, state, aggregation)

    def _receive_for_task(
        self,
        assignment: Assignment,
        chunk: UpdateChunk,
        traffic: PublishTraffic,
        upload: UploadRecord,
        state: State,
        aggregation: RoundAggregation,
    ) -> ReceiveResult:
        """Receive a chunk for an open task: limit its bytes, reassemble the update, validate it, and add it to the
        batch.

        Return the replies and answers that follow at once.
        """
        device, number = assignment.device, assignment.round

        # A copy of a chunk costs the device nothing, because anyone who overheard it can send it again. A copy of the
        # last one repeats the request for missing chunks. New chunks are limited in bytes.
        if self._reassembler.holds(device, chunk):
            if chunk.index < chunk.count - 1 or not self._rate_limiter.allow("copy", device):
                return _NOTHING
        else:
            upload.sent_bytes += traffic.payload
            limit = _ENVELOPE_FACTOR * self._limits.update_copies
            if upload.sent_bytes > limit * aggregation.max_update_bytes(assignment.tier):
                self._rate_limiter.counts["updates too often"] += 1
                return _NOTHING

        try:
            validation.check_size(chunk, assignment.tier, aggregation)
            if chunk.is_offer:
                self._reassembler.check(chunk)
                is_copy = self._scheduler.is_requested(device, chunk)
                if not is_copy or self._rate_limiter.allow("copy", device):
                    self._scheduler.offer(device, chunk)
                return _NOTHING
            self._scheduler.note_chunk(device, chunk)
            result = self._reassembler.add(device, chunk)
            if isinstance(result, MissingChunks):
                request = acks.missing(number, chunk, result.indices, result.text)
                return ReceiveResult((Reply(device, request),))
            if result is not None:
                self._scheduler.remove(device, is_complete=True)
                self._add_to_batch(self._validate(assignment, result, upload, state, aggregation))
        except UpdateRejected as refusal:
            self._reassembler.drop(device)
            self._scheduler.remove(device)
            reply = self._reject(device, number, chunk, refusal, task=assignment, step=aggregation.number)
            answer = Answered(device, accepted=False, reason=reply.ack.text, nonce=assignment.nonce)
            return ReceiveResult((reply,), (answer,))
        return _NOTHING

    def _validate(
        self,
        assignment: Assignment,
        whole: ReassembledUpdate,
        upload: UploadRecord,
        state: State,
        aggregation: RoundAggregation,
    ) -> _ValidUpdate:
        """Decode and validate a complete update, and return it with its row for the journal.

        The traffic in ``upload`` moves to that row.

        Raises:
            UpdateRejected: If any part of the update is invalid.
        """
        update = validation.decode_update(whole.data)
        if update.device != assignment.device:
            raise UpdateRejected(
                "wrong-device",
                f"the update came from {assignment.device} and says it is from {update.device[:64]!r}; "
                "send each update under the device's own topic",
                device=assignment.device,
            )
        claim = UpdateClaim(
            assignment.device,
            update.run,
            update.round,
            update.nonce,
            update.tier,
            update.model_version,
            update.samples,
        )
        weight = aggregation.weight(weigh(self._rules, state, claim))
        layout = aggregation.update_layout(update.tier, update.round)
        validation.check_codec(update, layout.form)
        checked = aggregation.check(update)
        up, upload.traffic = upload.traffic, PublishTraffic()
        row = AcceptedUpdate(
            assignment,
            sha256=whole.sha256,
            weight=weight,
            share=self._rules.share(aggregation.number - assignment.round),
            metrics=validation.finite_metrics(update.metrics),
            down=validation.reported_download(update),
            up=up,
            up_float32_bytes=up.payload - len(update.tensors) + aggregation.float32_bytes(update.tier),
            data=whole.data,
            train_ms=validation.train_ms(update, aggregation.update_layouts[update.tier].manifest),
        )
        return _ValidUpdate(row, update, checked.added)

    def _answer_again(self, assignment: Assignment, number: int, chunk: UpdateChunk) -> ReceiveResult:
        """Return the acknowledgement of an update whose task has already been answered. Nothing is changed."""
        device, accepted = assignment.device, ""
        if assignment.status == "accepted":
            accepted = self._journal.accepted_sha256(self._rules.run, number, device, assignment.nonce)
        ack = acks.already_answered(assignment, number, chunk, accepted, self._rules)
        return ReceiveResult((Reply(device, ack),))

    def _answer_unrequested(
        self, device: str, number: int, chunk: UpdateChunk, refusal: UpdateRejected, state: State
    ) -> ReceiveResult:
        """Return the answer to an update that belongs to no open task, within the rate limit.

        A late copy of an accepted update is acknowledged as accepted; any other is refused with ``refusal`` and
        journaled.
        """
        is_known = device in state.devices
        if not self._rate_limiter.allow("answer", device, is_known=is_known):
            return _NOTHING
        if not is_known:  # a name without a hello must not fill the journal
            ack = acks.rejected(number, chunk, refusal)
            self._events.emit(Rejected(device=device, round=number, reason=ack.reason, text=ack.text))
            return ReceiveResult((Reply(device, ack),))
        if number <= state.next_round and _NONCE.fullmatch(chunk.nonce):
            accepted = self._journal.accepted_sha256(self._rules.run, number, device, chunk.nonce)
            if accepted and accepted == chunk.sha256:
                return ReceiveResult((Reply(device, acks.accepted(number, chunk)),))
            if self._rules.buffered:
                status = self._journal.task_status(self._rules.run, number, device, chunk.nonce)
                refusal = acks.task_over(status, number, self._rules) or refusal
        # Only rounds that exist have rows: an update for a later one is journaled with the next round.
        step = state.next_round if self._rules.buffered else min(number, state.next_round)
        return ReceiveResult((self._reject(device, number, chunk, refusal, task=None, step=step),))

    def _reject(
        self,
        device: str,
        number: int,
        chunk: UpdateChunk,
        refusal: UpdateRejected,
        *,
        task: Assignment | None,
        step: int,
    ) -> Reply:
        """Journal a refused update, at most once, and return the reply that refuses it.

        ``task`` is the task that ends with the refusal, or None. ``step`` is the number of the current round.
        """
        ack = acks.rejected(number, chunk, refusal)
        # The chunk's own nonce and digest may be of any length: the journal gets their digest.
        key = hashlib.sha256(f"{number}/{chunk.nonce}/{chunk.sha256}".encode()).hexdigest()
        row = self._rules.run, min(number, step), device, key[:24], key, ack.reason, ack.text
        if self._journal.reject(*row, step=step, final=task):
            self._events.emit(Rejected(device=device, round=number, reason=ack.reason, text=ack.text))
        return Reply(device, ack)

    # -- batch -----------------------------------------------------------------------------------------------

    def _add_to_batch(self, update: _ValidUpdate) -> None:
        if not self._batch:
            self._batch_since = time.monotonic()
        self._batch[update.device] = update
        self._batch_bytes += len(update.row.data)

    def _take_batch(self) -> list[_ValidUpdate]:
        updates, self._batch, self._batch_bytes = list(self._batch.values()), {}, 0
        return updates

    def flush(self, aggregation: RoundAggregation) -> ReceiveResult:
        """Journal the batch, add its updates to the sums, and acknowledge them.

        The order makes ``kill -9`` harmless. A device deletes its update once it is acknowledged, so the journal must have
        the update first: a restarted server reads it from there and adds it again. If the acknowledgement is lost, the
        device sends its update again, and the journal identifies the copy by its digest. The sums come after the journal,
        because a sum cannot be undone if the journal refuses the update.

        Args:
            aggregation: Round that receives updates.

        Returns:
            The acknowledgements, and the accepted answers.

        Raises:
            StoreError: If the journal cannot be written. The batch stays, and nothing is acknowledged.
        """
        updates = self._take_batch()
        try:
            journaled, replies = self._journal_updates(updates, aggregation)
        except StoreError:
            for each in updates:
                self._add_to_batch(each)
            raise
        answers = []
        for each in journaled:
            row, message = each.row, each.message
            self._events.emit(validation.accepted_event(message, row.sha256, row.weight))
            aggregation.aggregator.add(each.checked, row.weight, row.share)
            self._reassembler.forget(each.device)
            self._events.emit(validation.report_event(message, row.down, row.up))
            self._warn_once(message)
            task = row.assignment
            upload = self._uploads.setdefault(each.device, UploadRecord())
            upload.sent_bytes, upload.accepted = 0, (task.round, task.nonce, row.sha256)
            ack = Ack(round=task.round, nonce=task.nonce, status="accepted", sha256=row.sha256)
            replies.append(Reply(each.device, ack))
            answers.append(Answered(each.device, True, nonce=task.nonce))
        return ReceiveResult(tuple(replies), tuple(answers))

    def _journal_updates(
        self, updates: list[_ValidUpdate], aggregation: RoundAggregation
    ) -> tuple[list[_ValidUpdate], list[Reply]]:
        """Journal updates. Return (updates that are in the journal, refusals of the others).

        If another process closed the round or answered a task meanwhile, the journal refuses the whole batch. Then the
        updates are written one by one.

        Raises:
            StoreError: If the journal cannot be written.
        """
        run, number = self._rules.run, aggregation.number
        try:
            self._journal.accept(run, number, [each.row for each in updates])
            return updates, []
        except RoundOver:
            pass
        if len(updates) > 1:
            parts = [self._journal_updates([each], aggregation) for each in updates]
            return [each for kept, _ in parts for each in kept], [
                reply for _, part in parts for reply in part
            ]
        [update] = updates
        task, sha256 = update.row.assignment, update.row.sha256
        # A commit that failed on its way back to us may have written the update.
        if self._journal.accepted_sha256(run, task.round, task.device, task.nonce) == sha256:
            return updates, []
        chunk = UpdateChunk(nonce=task.nonce, sha256=sha256, index=0, count=1, size=0, data=b"")
        refusal = UpdateRejected(
            "closed-round", f"round {number} takes no updates any more; drop the update", round=number
        )
        return [], [self._reject(task.device, number, chunk, refusal, task=None, step=number)]

    def _warn_once(self, update: Update) -> None:
        """Emit a warning, once per tier, if the metrics of an update show that training may diverge."""
        text = runaway_warning(update.metrics)
        if text and update.tier not in self._warned_tiers:
            self._warned_tiers.add(update.tier)
            self._events.emit(Warned(tier=update.tier, text=f"tier {update.tier!r}: {text}"))

    # -- uploads and rounds ----------------------------------------------------------------------------------

    def request_uploads(self, opened: OpenRound) -> ReceiveResult:
        """Begin the uploads for which there is memory.

        Args:
            opened: The open round.

        Returns:
            Requests to the devices that may upload now, and events for the devices that did not use their turn.
        """
        replies = []
        for device, offer in self._scheduler.next(opened.opened, opened.deadline):
            missing = self._reassembler.missing(device, offer)
            request = acks.missing(opened.assignments[device].round, offer, missing)
            replies.append(Reply(device, request))
        lost = tuple(
            TurnLost(device, opened.assignments[device].nonce) for device in self._scheduler.take_lost()
        )
        return ReceiveResult(tuple(replies), lost)

    def cancel(self, devices: Iterable[str]) -> None:
        """Drop the unfinished updates of ``devices`` and their places in the upload queue, because their tasks are over."""
        for device in devices:
            self._reassembler.forget(device)
            self._scheduler.remove(device)
            if device in self._uploads:
                self._uploads[device].sent_bytes = 0

    def end_round(self, ended: OpenRound) -> None:
        """Drop the unfinished updates of a round, and journal the copies that devices sent after their accepted update.

        In asynchronous rounds, uploads for tasks that continue are kept.

        Args:
            ended: The round, with its answers.

        Raises:
            StoreError: If the journal cannot be written.
        """
        if ended.buffered:
            is_open = ended.assignments.open
            self.cancel(
                device for device, each in self._uploads.items() if each.sent_bytes and device not in is_open
            )
        else:
            self._take_batch()
            self._reassembler.clear()
            self._scheduler.clear()
            for each in self._uploads.values():
                each.sent_bytes = 0
        accepted = [each.device for each in ended.with_status("accepted") if each.device in self._uploads]
        traffic = {device: self._uploads[device].traffic for device in accepted}
        more = {device: each for device, each in traffic.items() if each != PublishTraffic()}
        self._journal.add_traffic(self._rules.run, ended.number, more)
        for device in more:
            self._uploads[device].traffic = PublishTraffic()

    def replay(self, aggregation: RoundAggregation, shards: Collection[int] | None = None) -> dict[str, str]:
        """Add the journaled updates of an open round to its sums, after a restart. Their events are emitted again.

        Args:
            aggregation: The round.
            shards: Shards whose updates are added; None for all.

        Returns:
            Digests of the updates by device.

        Raises:
            StoreError: If the journal or an update's bytes cannot be read.
        """
        digests = {}
        for event, checked, share in stored_updates(self._journal, self._rules.run, aggregation, shards):
            digests[event.device] = event.sha256
            upload = self._uploads.setdefault(event.device, UploadRecord())
            upload.accepted = event.round, event.nonce, event.sha256
            self._events.emit(event)  # the other process may have ended before it reported the update
            aggregation.aggregator.add(checked, event.weight, share)
        return digests


def stored_updates(
    journal: Journal, run: str, aggregation: RoundAggregation, shards: Collection[int] | None = None
) -> Iterator[tuple[UpdateAccepted, CheckedArrays, float]]:
    """Read the accepted updates of a round from the journal, decode and validate them.

    Args:
        journal: Journal of the run.
        run: Identifier of the run.
        aggregation: The round.
        shards: Shards to read; None for all.

    Yields:
        The event of each update, its arrays for the sums, and the factor of its change.

    Raises:
        StoreError: If the journal or an update's bytes cannot be read.
    """
    for stored in journal.accepted(run, aggregation.number, shards):
        update = validation.decode_update(stored.data)
        validation.check_codec(update, aggregation.update_layout(update.tier, update.round).form)
        event = validation.accepted_event(update, stored.sha256, stored.weight)
        yield event, aggregation.check(update).added, stored.share
