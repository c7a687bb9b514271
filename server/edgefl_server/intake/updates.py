"""From a chunk on a topic to an update in the journal and in the sum: assemble, judge, check, journal, add, acknowledge."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from edgefl.codecs.growth import warning
from edgefl.errors import StoreError, UpdateRejected
from edgefl.system.memory import most_bytes
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Ack, Update, UpdateChunk
from edgefl.wire.mqtt.topics import PublishTraffic
from edgefl.wire.text import printable
from edgefl_server.coordinator.claims import Claim, addressed, weigh
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.states import Answered, OpenRound, Rules, State, TurnLost
from edgefl_server.events import Event, Rejected, Warned
from edgefl_server.intake.assembly import LEAST_PIECE, Assembly, Complete
from edgefl_server.intake.gate import Gate
from edgefl_server.intake.group import GoodUpdate, Group
from edgefl_server.intake.reading import check_codec, check_size, decoded
from edgefl_server.intake.reports import accepted_news, fetched, finite, report, train_ms
from edgefl_server.intake.stored import added
from edgefl_server.intake.turns import Turns
from edgefl_server.intake.words import (
    MOST_TEXT,
    good_news,
    is_edge,
    over,
    refusal_of,
    request_for,
    word_on_answered,
)
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.round_rows import RoundOver
from edgefl_server.storage.update_rows import AcceptedUpdate
from edgefl_server.taking.active import ActiveRound

_ENVELOPES = 4
"""Times that the messages around the smallest pieces may be larger than what is in them."""
_NONCE = re.compile(r"[0-9a-f]{24}")


@dataclass(frozen=True)
class Verdict:
    """What a chunk led to at once: a word for the device, and news for the coordinator. An update that is whole and good
    leads to nothing before :meth:`Intake.commit`."""

    ack: Ack | None = None
    answered: Answered | None = None


class Intake:
    """Takes the updates of one run. Nothing is acknowledged as accepted before the journal has it."""

    def __init__(
        self,
        rules: Rules,
        journal: Journal,
        limits: Limits,
        emit: Callable[[Event], None],
        gate: Gate,
        turns: Turns,
    ) -> None:
        self._gate = gate
        self._limits = limits
        self._rules = rules
        self._journal = journal
        self._emit = emit
        self._warned: set[str] = set()
        self._assembly = Assembly(
            update_bytes=limits.max_update_bytes,
            most_bytes=min(limits.max_pending_bytes, most_bytes() // 4 or limits.max_pending_bytes),
            least_piece=min(LEAST_PIECE, limits.chunk_bytes // 2),
        )
        self._came: dict[str, PublishTraffic] = {}
        """Per known device, what came since its last report and is not in the journal."""
        self._accepted: dict[str, tuple[int, str, str]] = {}
        """Per device the round, nonce and digest of its last update that was accepted."""
        self._spent: dict[str, int] = {}
        """Per device with a task, bytes of the messages of this round that held new pieces of its update."""
        self._group = Group()
        self._turns = turns

    def end_round(self, ended: OpenRound) -> None:
        """The round is over: what is not whole will not be, unless its task goes on; second copies of what was accepted are
        journaled."""
        reporting = [each.device for each in ended.with_status("accepted") if each.device in self._came]
        more = {device: self._came.pop(device) for device in reporting}
        self._journal.add_traffic(self._rules.run, ended.number, more)
        if ended.buffered:
            self.reassigned(set(self._spent) - set(ended.assignments.open))
            return
        self._group.take()
        self._assembly.clear()
        self._turns.clear()
        self._spent.clear()

    def reassigned(self, devices: Iterable[str]) -> None:
        """The tasks of these devices are over: what came for them is of no use."""
        for device in list(devices):
            self._assembly.forget(device)
            self._turns.over(device)
            self._spent.pop(device, None)

    @property
    def forgotten(self) -> int:
        """Unfinished updates that had to go because there were too many."""
        return self._assembly.forgotten

    def take(
        self,
        device: str,
        number: int,
        chunk: UpdateChunk,
        came: PublishTraffic,
        state: State,
        active: ActiveRound | None,
    ) -> Verdict:
        """Take one chunk of ``device``'s update for round ``number``; ``came`` is the size of its message, ``active`` the
        round that takes updates, if any does.

        An answer that needs no assembling (a second copy, a closed round) is given at the first chunk, so that the
        device may save the rest, and again at the last.
        """
        if device in state.devices:  # nobody else has a say in how much is kept
            self._came[device] = self._came.get(device, PublishTraffic()) + came
        if device in self._group:  # it hears of it in a moment
            return Verdict()
        if self._accepted.get(device) == (number, chunk.nonce, chunk.sha256):
            answers = is_edge(chunk) and self._gate.answers_copy(device)
            return Verdict(good_news(number, chunk)) if answers else Verdict()
        try:
            assignment = addressed(state, device, number, chunk.nonce)
        except UpdateRejected as refusal:
            return self._stray(device, number, chunk, refusal, state) if is_edge(chunk) else Verdict()
        if assignment.status != "open":
            answers = is_edge(chunk) and self._gate.answers(device, known=True)
            return Verdict(self._repeated(assignment, number, chunk)) if answers else Verdict()
        return self._fed(assignment, number, chunk, came, state, active) if active is not None else Verdict()

    def _fed(
        self,
        assignment: Assignment,
        number: int,
        chunk: UpdateChunk,
        came: PublishTraffic,
        state: State,
        active: ActiveRound,
    ) -> Verdict:
        """A piece for an open task."""
        device = assignment.device
        if self._assembly.holds(device, chunk):  # whoever overheard it can send it again
            if chunk.index < chunk.count - 1 or not self._gate.answers_copy(device):
                return Verdict()
        elif not self._may_send(device, came, active.most_bytes(assignment.tier)):
            return Verdict()
        try:
            return self._piece(assignment, number, chunk, state, active)
        except UpdateRejected as refusal:
            self._assembly.drop(device)
            self._turns.over(device)
            return self._refuse(device, number, chunk, refusal, final=assignment, step=active.number)

    def _piece(
        self, assignment: Assignment, number: int, chunk: UpdateChunk, state: State, active: ActiveRound
    ) -> Verdict:
        """A piece of the update that a task asks for; UpdateRejected if it, or the whole, is not acceptable."""
        check_size(chunk, assignment.tier, active)
        if chunk.is_offer:
            self._assembly.check(chunk)
            if self._turns.has_heard(assignment.device, chunk) and not self._gate.answers_copy(
                assignment.device
            ):
                return Verdict()
            self._turns.offer(assignment.device, chunk)
            return Verdict()
        self._turns.fed(assignment.device, chunk)
        piece = self._assembly.add(assignment.device, chunk)
        if piece is None:
            return Verdict()
        if isinstance(piece, Complete):
            self._turns.over(assignment.device, whole=True)
            self._group.add(self._good(assignment, piece, state, active))
            return Verdict()
        return Verdict(request_for(number, chunk, piece.indices, piece.text))

    def _may_send(self, device: str, came: PublishTraffic, most: int) -> bool:
        """Whether a device has not yet sent its update, of ``most`` bytes, as often as it may."""
        spent = self._spent[device] = self._spent.get(device, 0) + came.payload
        allowed = spent <= _ENVELOPES * self._limits.update_copies * most
        if not allowed:
            self._gate.counts["updates too often"] += 1
        return allowed

    def wait(self, state: State) -> float | None:
        """Seconds until :meth:`commit` is not to wait for more: at once where there is enough for one step, or for the round
        to close. None if there is nothing to commit."""
        enough = (
            state.round is not None and state.round.count("accepted") + len(self._group) >= state.round.goal
        )
        if enough and self._group:
            return 0.0
        waits = [wait for wait in (self._group.wait(), self._turns.wait()) if wait is not None]
        return min(waits, default=None)

    @property
    def pending(self) -> bool:
        """Whether there are updates to commit."""
        return len(self._group) > 0

    def asked(self, opened: OpenRound) -> list[tuple[str, Ack]]:
        """Return the requests to devices whose turn to send their update begins."""
        acks = []
        for device, offer in self._turns.next(opened.opened, opened.deadline):
            missing = self._assembly.gaps(device, offer)
            acks.append((device, request_for(opened.assignments[device].round, offer, missing)))
        return acks

    def lost_turns(self, opened: OpenRound) -> tuple[TurnLost, ...]:
        """Return the turns that devices lost since the last call."""
        return tuple(TurnLost(device, opened.assignments[device].nonce) for device in self._turns.take_lost())

    def commit(self, active: ActiveRound) -> list[tuple[str, Ack]]:
        """Journal the good updates that came, then add them to the sums: what their devices are told. StoreError if they
        could not be kept, as far as is known: then nobody is told, and they wait for another try."""
        updates = self._group.take()
        try:
            kept, acks = self._kept(updates, active)
        except StoreError:
            for each in updates:
                self._group.add(each)
            raise
        for each in kept:
            row = each.row
            self._emit(accepted_news(each.update, row.sha256, row.weight))
            active.aggregator.add(each.added, row.weight, row.share)
            self._assembly.forget(each.device)
            self._spent.pop(each.device, None)
            self._emit(report(each.update, row.down, row.up))
            self._warn(each.update)
            nonce = row.assignment.nonce
            number = row.assignment.round
            self._accepted[each.device] = number, nonce, row.sha256
            ack = Ack(round=number, nonce=nonce, status="accepted", sha256=row.sha256)
            acks.append((each.device, ack))
        return acks

    def _kept(
        self, updates: list[GoodUpdate], active: ActiveRound
    ) -> tuple[list[GoodUpdate], list[tuple[str, Ack]]]:
        """Those of ``updates`` that are journaled now, and what the devices of the others are told: where workers take
        updates, too, another process may have closed the round, or answered a task. One that the journal has already was
        kept before, by a commit that nobody heard of."""
        try:
            self._journal.accept(self._rules.run, active.number, [each.row for each in updates])
            return updates, []
        except RoundOver:
            if len(updates) == 1 and self._is_kept(updates[0].row):
                return updates, []
            if len(updates) == 1:
                return [], [self._too_late(updates[0], active.number)]
        parts = [self._kept([each], active) for each in updates]
        return [each for kept, _ in parts for each in kept], [ack for _, acks in parts for ack in acks]

    def _is_kept(self, row: AcceptedUpdate) -> bool:
        task = row.assignment
        known = self._journal.accepted_sha256(self._rules.run, task.round, task.device, task.nonce)
        return known == row.sha256

    def _too_late(self, update: GoodUpdate, number: int) -> tuple[str, Ack]:
        row = update.row
        chunk = UpdateChunk(nonce=row.assignment.nonce, sha256=row.sha256, index=0, count=1, size=0, data=b"")
        refusal = UpdateRejected(
            "closed-round", f"round {number} takes no updates any more; drop the update", round=number
        )
        verdict = self._refuse(update.device, number, chunk, refusal, final=None, step=number)
        assert verdict.ack is not None  # a refusal is told
        return update.device, verdict.ack

    def _good(self, assignment: Assignment, whole: Complete, state: State, active: ActiveRound) -> GoodUpdate:
        update = decoded(whole.data)
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
        weight = active.weight(weigh(self._rules, state, claim))
        check_codec(update, active.reading(update.tier, update.round).form)
        checked = active.check(update)
        down, up = fetched(update), self._came.pop(assignment.device)
        row = AcceptedUpdate(
            assignment,
            sha256=whole.sha256,
            weight=weight,
            share=self._rules.share(active.number - assignment.round),
            metrics=finite(update.metrics),
            down=down,
            up=up,
            up_float32_bytes=up.payload - len(update.tensors) + active.float32_bytes(update.tier),
            data=whole.data,
            train_ms=train_ms(update, active.readings[update.tier].manifest),
        )
        return GoodUpdate(row, update, checked.added)

    def _warn(self, update: Update) -> None:
        """Once for a tier: what the metrics say that a person should know."""
        text = warning(update.metrics)
        if text and update.tier not in self._warned:
            self._warned.add(update.tier)
            self._emit(Warned(tier=update.tier, text=f"tier {update.tier!r}: {text}"))

    def replay(self, active: ActiveRound, shards: Collection[int] | None = None) -> dict[str, str]:
        """Add what the journal holds of a round that another process began (of these ``shards`` only). Digests of the
        updates, by device."""
        taken = {}
        for news, checked, share in added(self._journal, self._rules.run, active, shards):
            taken[news.device] = news.sha256
            self._accepted[news.device] = news.round, news.nonce, news.sha256
            self._emit(news)  # the process may have died before it said so
            active.aggregator.add(checked, news.weight, share)
        return taken

    def _repeated(self, assignment: Assignment, number: int, chunk: UpdateChunk) -> Ack:
        accepted = ""
        if assignment.status == "accepted":
            device, nonce = assignment.device, assignment.nonce
            accepted = self._journal.accepted_sha256(self._rules.run, number, device, nonce)
        return word_on_answered(assignment, number, chunk, accepted, self._rules)

    def _stray(
        self, device: str, number: int, chunk: UpdateChunk, refusal: UpdateRejected, state: State
    ) -> Verdict:
        """An update for no open assignment: a late second copy of an accepted one is still good news.

        One for a round that has not begun is journaled with the next: only rounds that exist have rows. Nothing is
        journaled of a name that said no hello.
        """
        known = device in state.devices
        if not self._gate.answers(device, known=known):
            return Verdict()
        if not known:
            return Verdict(self._told(device, number, chunk, refusal))
        if number <= state.next_round and _NONCE.fullmatch(chunk.nonce):
            accepted = self._journal.accepted_sha256(self._rules.run, number, device, chunk.nonce)
            if accepted and accepted == chunk.sha256:
                return Verdict(good_news(number, chunk))
            if self._rules.buffered:
                status = self._journal.task_status(self._rules.run, number, device, chunk.nonce)
                refusal = over(status, number, self._rules) or refusal
        step = state.next_round if self._rules.buffered else min(number, state.next_round)
        return self._refuse(device, number, chunk, refusal, final=None, step=step)

    def _refuse(
        self,
        device: str,
        number: int,
        chunk: UpdateChunk,
        refusal: UpdateRejected,
        *,
        final: Assignment | None,
        step: int,
    ) -> Verdict:
        reason, text = refusal.reason, printable(refusal.message, MOST_TEXT)
        key = hashlib.sha256(
            f"{number}/{chunk.nonce}/{chunk.sha256}".encode()
        ).hexdigest()  # bounded, whatever was sent
        row = self._rules.run, min(number, step), device, key[:24], key, reason, text
        if self._journal.reject(*row, step=step, final=final):
            self._emit(Rejected(device=device, round=number, reason=reason, text=text))
        ack = refusal_of(number, chunk, refusal)
        if final is None:
            return Verdict(ack)
        return Verdict(ack, Answered(device, accepted=False, reason=text, nonce=final.nonce))

    def _told(self, device: str, number: int, chunk: UpdateChunk, refusal: UpdateRejected) -> Ack:
        ack = refusal_of(number, chunk, refusal)
        self._emit(Rejected(device=device, round=number, reason=ack.reason, text=ack.text))
        return ack
