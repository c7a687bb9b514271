"""The server's side of its workers: hires them, tells them of rounds, adds up their sums, and hires anew who died.

How a round ends is what keeps ``kill -9`` harmless: it is closed in the journal first, which no worker's commit can pass
(:func:`edgefl_server.storage.round_rows.close`). Then each worker gives its sum and the digest of the updates in it.
Where that is not what the journal has of its shards, or the worker is no more, the server adds these updates up itself:
sums of whole numbers, so whoever adds them gives the same bits.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import msgspec

from edgefl.errors import StoreError
from edgefl.system.cores import cores
from edgefl.wire.limits import Limits
from edgefl_server.aggregate.aggregator import PartialSum
from edgefl_server.coordinator import states
from edgefl_server.coordinator.fleet import Assignment, Assignments
from edgefl_server.coordinator.states import Answers, OpenRound, Outage
from edgefl_server.events import Noted, Warned
from edgefl_server.identity.registry import DeviceKey
from edgefl_server.patience import Persist
from edgefl_server.reception import Course, Tellers
from edgefl_server.round_aggregation import RoundAggregation, RoundAggregationSpec
from edgefl_server.shards import messages
from edgefl_server.shards.slots import SHARDS, shards_of, worker_of
from edgefl_server.storage.journal import Journal
from edgefl_server.updates.receiver import stored_updates

_SUM_S = 120.0
"""That a worker may take to add up what waits, before the server does its work."""
_KEYS_S = 1.0
"""Between two looks whether keys of devices have changed: `edgefl enroll revoke` counts from then on."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
"""Before a worker that died is hired again: doubled each time, until one has lived for as long as the longest."""


class Hand(Protocol):
    """One worker, wherever it runs."""

    def tell(self, order: messages.Order) -> None: ...

    def kill(self) -> None: ...

    def end(self) -> None: ...


Hire = Callable[[messages.Told, Callable[[messages.News], None]], Hand]
"""Starts a worker; its news are delivered on a thread of its own. StoreError where it cannot be had just now."""


@dataclass(frozen=True, kw_only=True)
class Around:
    """What the crew needs of the server: its state, the keys of devices, and whom it tells."""

    course: Course
    tellers: Tellers
    keys: Callable[[str], tuple[DeviceKey, ...]]
    send_task: Callable[[OpenRound, Assignment], None]
    deliver: Callable[[messages.FromWorker], None]
    persist: Persist
    clock: Callable[[], float]


@dataclass
class _Member:
    number: int
    shards: range
    hand: Hand | None = None
    hired: int = 0
    hired_at: float = 0.0
    ready: int = 0
    pause_s: float = _FIRST_PAUSE_S
    again_at: float | None = 0.0
    in_trouble: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)


class Crew:
    """``told`` is what all workers are told, whose number is put in; with fewer than two there is none, and the server
    itself takes all updates."""

    def __init__(self, told: messages.Told, journal: Journal, hire: Hire, around: Around) -> None:
        self._told = replace(told, limits=_share(told.limits, told.workers))
        self._journal = journal
        self._hire = hire
        self._around = around
        wanted = told.workers if told.workers > 1 else 0
        self._members = [_Member(number, shards_of(number, wanted)) for number in range(wanted)]
        self._recipe: RoundAggregationSpec | None = None
        self._sums: queue.SimpleQueue[messages.FromWorker] = queue.SimpleQueue()
        self._known: dict[str, tuple[DeviceKey, ...]] = {}
        self._keys_at = 0.0
        self._noted_few = False
        self._trouble_since: float | None = None

    @property
    def there(self) -> bool:
        """Whether there are workers."""
        return bool(self._members)

    @property
    def in_trouble(self) -> bool:
        """Whether some updates cannot be taken at the moment: no deadline passes then."""
        return any(member.in_trouble for member in self._members)

    @property
    def turned_away(self) -> Mapping[str, int]:
        """How many messages workers did not read, or not keep, by why."""
        return sum((Counter(member.counts) for member in self._members), Counter())

    def has_heard(self, device: str, number: int) -> bool:
        """Whether the update of ``device`` for that round would be taken by now."""
        return not self._members or self._of(device).ready == number

    def stop(self) -> None:
        """Let them go, all at the same time."""
        hands = [member.hand for member in self._members if member.hand is not None]
        for hand in hands:
            hand.tell(messages.Stop())
        for hand in hands:
            hand.end()
        for member in self._members:
            member.hand = None

    # -- rounds ----------------------------------------------------------------------------------------------

    def begin(self, opened: OpenRound, active: RoundAggregation) -> None:
        """Tell all workers of a round."""
        if not self._members:
            return
        threads = max(1, cores() // len(self._members))
        self._recipe = replace(active.spec, threads=threads)
        if len(opened.assignments) < len(self._members) and not self._noted_few:
            self._noted_few = True
            text = (
                f"there are {len(self._members)} workers, and round {opened.number} has {len(opened.assignments)} devices: "
                "some have nothing to do"
            )
            self._around.tellers.emit(Noted(text=text))
        for member in self._members:
            if member.hand is not None:
                self._tell_round(member, member.hand, opened)

    def declined(self, device: str) -> None:
        """A device will send no update."""
        if self._members and (hand := self._of(device).hand) is not None:
            hand.tell(messages.Declined(device))

    def end(self, ended: OpenRound, active: RoundAggregation, *, summed: bool) -> OpenRound:
        """The round as it ended, by the journal; what workers took is added to ``active``, if it is to be ``summed``."""
        self._recipe = None
        if not self._members:
            return ended
        run, number = self._told.rules.run, ended.number
        taken = self._around.persist(lambda: self._journal.stop_taking(run, number))
        sums = self._collected(number, summed=summed)
        for member in self._members if summed else ():
            rows = {device: sha256 for device, (shard, sha256) in taken.items() if shard in member.shards}
            given = sums.get(member.number)
            if given is None or given.taken != messages.digest(rows):
                part = self._around.persist(partial(self._added_here, active.spec, member.shards))
            else:
                part = given.partial
            if part is not None:
                active.aggregator.take(part)
        tasks = ended.assignments
        for device in taken:
            tasks = tasks.answered(device, "accepted")
        return replace(ended, assignments=tasks)

    def _collected(self, number: int, *, summed: bool) -> dict[int, messages.Summed]:
        """What the workers give, by their numbers; those that died, or take too long, give nothing."""
        asked = {member.number: member for member in self._members if member.hand is not None}
        for member in asked.values():
            if member.hand is not None:
                member.hand.tell(messages.End(number, summed))
        sums: dict[int, messages.Summed] = {}
        until = time.monotonic() + _SUM_S
        while asked:
            try:
                said = self._sums.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                for member in asked.values():
                    self._lost(member, f"gave no sum within {_SUM_S:g} s")
                break
            member = self._members[said.worker]
            if said.hired != member.hired:
                continue
            if isinstance(said.news, messages.Summed) and said.news.round == number:
                sums[said.worker] = said.news
            if not isinstance(said.news, messages.Summed) or said.news.round == number:
                asked.pop(said.worker, None)
        return sums

    def _added_here(self, recipe: RoundAggregationSpec, shards: range) -> PartialSum | None:
        """The updates of these shards, from the journal; all anew where a part of it could not be read."""
        active = recipe.build()
        for update, stored, share in stored_updates(self._journal, self._told.rules.run, active, shards):
            self._around.tellers.emit(update)
            active.aggregator.add(stored, update.weight, share)
        return active.aggregator.partial()

    def _tell_round(self, member: _Member, hand: Hand, opened: OpenRound) -> None:
        if self._recipe is None:
            return
        tasks = {device: task for device, task in opened.assignments.items() if self._of(device) is member}
        keys = {device: self._around.keys(device) for device in tasks}
        self._known |= keys
        part = replace(opened, assignments=Assignments(tasks), goal=max(1, len(tasks)))
        hand.tell(messages.Begin(part, self._recipe, keys))

    # -- what workers say ------------------------------------------------------------------------------------

    def heard(self, said: messages.FromWorker) -> states.Event | None:
        """What a worker says is done; what the coordinator is to know of it."""
        member = self._members[said.worker]
        if said.hired != member.hired:
            return None
        match said.news:
            case messages.Ready(number):
                return self._ready(member, number)
            case messages.Took():
                return self._took(said.news)
            case messages.WhoIs(device):
                known = device in self._around.course.state.devices
                keys = self._around.keys(device) if known else None
                self._tell(member, messages.Know({device: keys}))
            case messages.Troubled(text):
                self._in_trouble(member, StoreError(text))
            case messages.TurnedAway(counts):
                member.counts = counts
            case messages.Died(why):
                self._lost(member, why)
        return None

    def _ready(self, member: _Member, number: int) -> Outage | None:
        member.ready, member.in_trouble = number, False
        current = self._around.course.state.round
        if current is not None and current.number == number:
            for task in current.with_status("open"):
                if self._of(task.device) is member:
                    self._around.send_task(current, task)
        return self._recovered()

    def _recovered(self) -> Outage | None:
        """Once nobody is in trouble any more: how long somebody was. Most often all were, for the same reason."""
        if self._trouble_since is None or self.in_trouble:
            return None
        since, self._trouble_since = self._trouble_since, None
        return Outage(self._around.clock() - since)

    def _took(self, took: messages.Took) -> Answers | None:
        for event in took.events:
            self._around.tellers.emit(event)
        for device, ack in took.acks:
            self._around.tellers.answer(device, ack)
        current = self._around.course.state.round
        if not took.answers or current is None or current.number != took.round:
            return None
        return Answers(took.answers)

    def _in_trouble(self, member: _Member, error: StoreError) -> None:
        """Until it says that it takes updates again: what it waits for is tried again and again."""
        member.in_trouble = True
        if self._trouble_since is None:
            self._trouble_since = self._around.clock()
        self._around.tellers.troubled(error)

    def _lost(self, member: _Member, why: str) -> None:
        if member.hand is None:
            return
        member.hand.kill()
        member.hand, member.ready = None, 0
        now = self._around.clock()
        lived = now - member.hired_at >= _LONGEST_PAUSE_S
        member.pause_s = _FIRST_PAUSE_S if lived else min(2 * member.pause_s, _LONGEST_PAUSE_S)
        member.again_at = now + member.pause_s
        text = f"worker {member.number} {why}; another one takes up what the journal has of its devices"
        self._around.tellers.emit(Warned(tier="", text=text))

    # -- by time ---------------------------------------------------------------------------------------------

    def step(self, now: float) -> float | None:
        """Hire who is missing, and tell of keys that changed. Seconds until it is to be asked again; None: no need."""
        if not self._members:
            return None
        for member in self._members:
            if member.again_at is not None and member.again_at <= now:
                self._hire_again(member, now)
        if self._recipe is not None and now >= self._keys_at + _KEYS_S:
            self._keys_at = now
            self._tell_keys()
        waits = [member.again_at - now for member in self._members if member.again_at is not None]
        return max(0.0, min([_KEYS_S, *waits]))

    def _hire_again(self, member: _Member, now: float) -> None:
        member.hired, member.hired_at, member.again_at = member.hired + 1, now, None

        def deliver(news: messages.News, hired: int = member.hired) -> None:
            said = messages.FromWorker(member.number, hired, news)
            if isinstance(news, messages.Summed | messages.Died):
                self._sums.put(said)
            if not isinstance(news, messages.Summed):
                self._around.deliver(said)

        try:
            member.hand = self._hire(replace(self._told, worker=member.number), deliver)
        except StoreError as error:
            self._in_trouble(member, error)
            member.pause_s = min(2 * member.pause_s, _LONGEST_PAUSE_S)
            member.again_at = now + member.pause_s
            return
        current = self._around.course.state.round
        if current is None:  # else once it is ready for the round
            member.in_trouble = False
            self._recovered()
        else:
            self._tell_round(member, member.hand, current)

    def _tell_keys(self) -> None:
        current = self._around.course.state.round
        if current is None:
            return
        changed: dict[int, dict[str, tuple[DeviceKey, ...] | None]] = {}
        for device in current.assignments.open:
            keys = self._around.keys(device)
            if _standing(keys) != _standing(self._known.get(device, ())):
                self._known[device] = keys
                changed.setdefault(self._of(device).number, {})[device] = keys
        for number, keys_of in changed.items():
            self._tell(self._members[number], messages.Know(keys_of))

    def _tell(self, member: _Member, order: messages.Order) -> None:
        if member.hand is not None:
            member.hand.tell(order)

    def _of(self, device: str) -> _Member:
        return self._members[worker_of(device, len(self._members))]


def most_workers(wanted: int) -> int:
    """How many there may be: none has less than a shard."""
    return min(wanted, SHARDS)


def _standing(keys: tuple[DeviceKey, ...]) -> list[tuple[bytes, str, int]]:
    return [(each.key, each.state, each.until) for each in keys]


def _share(limits: Limits, workers: int) -> Limits:
    """What each worker may hold, so that all together hold what one server might."""
    return msgspec.structs.replace(
        limits,
        asked_bytes=max(1, limits.asked_bytes // workers),
        max_pending_bytes=max(1, limits.max_pending_bytes // workers),
        inbox_bytes=max(1, limits.inbox_bytes // workers),
    )
