"""Portions dealt out to workers as they get free, and what they add brought together.

A worker that dies has its portions, since it last gave a partial sum, trained again by others: equal portions give equal
bits, and sums of whole numbers do not depend on who added what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from edgefl.errors import EdgeflError
from edgefl.simulator.trainers.tasks import Portion, ReadCarry, Report, RoundTask
from edgefl.simulator.trainers.worker import Failed, Method, Told
from edgefl_server.aggregate.aggregator import PartialSum
from edgefl_server.round_aggregation import RoundAggregation

_AHEAD = 2
"""Deals that a worker has at a time: one to train, one that waits for it."""

_MOST_PORTIONS = 16
_TRIES = 3
"""A deal of which so many workers died is not tried again: it is the deal that kills them."""


class Lost(Exception):
    """The worker is dead."""


class RemoteWorker(Protocol):
    """A worker, from here. Answers come in the order of the calls."""

    def call(self, method: Method, *given: object) -> None:
        """Never waits for the worker; one that is dead is noticed as :meth:`answer` is asked for."""

    def answer(self) -> object:
        """The next one, waited for: what the method gave, or its Failed. Lost if the worker is dead."""

    def close(self) -> None:
        """End it."""


class WorkerFactory(Protocol):
    """Where workers are."""

    def hire(self) -> RemoteWorker:
        """A new worker, which is told nothing yet."""

    def share(self, thing: object) -> object:
        """Stands for ``thing`` among what a hand is called with: it is sent once, and mapped by all who are near."""

    def ready(self, hands: Collection[RemoteWorker]) -> RemoteWorker:
        """Waits until one of them has an answer, or is dead."""

    def close(self) -> None: ...


@dataclass(eq=False)
class _Deal:
    """Portions that are dealt at a time, the ``number``-th of a round."""

    number: int
    portions: Sequence[Portion]
    tries: int = 0


@dataclass(frozen=True)
class _Due:
    """An answer that a member owes: of ``deal``, or of a partial sum over ``summed``; of neither where it was told
    something."""

    deal: _Deal | None = None
    summed: Sequence[_Deal] | None = None


@dataclass(eq=False)
class _PoolWorker:
    hand: RemoteWorker
    due: deque[_Due] = field(default_factory=deque)
    trained: list[_Deal] = field(default_factory=list)
    """Deals that no partial sum has been asked for."""

    @property
    def ahead(self) -> int:
        return sum(each.deal is not None for each in self.due)

    @property
    def lost(self) -> list[_Deal]:
        """What has to be trained again if it dies now."""
        return [*(deal for each in self.due for deal in each.summed or ()), *self.trained]


class Pool:
    """:class:`~edgefl.simulator.trainers.tasks.Trainers` of ``size`` workers of ``crew``."""

    def __init__(self, crew: WorkerFactory, size: int, told: Told) -> None:
        self._crew = crew
        self._size = size
        self._told = crew.share(told)
        self._task: object | None = None
        self._members: list[_PoolWorker] = []
        self._hire()

    def begin(self, task: RoundTask, active: RoundAggregation) -> None:
        self._task = self._crew.share(task)
        self._active = active
        for member in self._members:
            self._tell(member, "begin", self._task)

    def train(self, portions: Sequence[Portion], read: ReadCarry) -> Iterator[Report]:
        queue = deque(self._deals(portions))
        told: set[str] = set()
        failed: dict[int, Exception] = {}
        while queue or any(member.lost for member in self._members):
            self._deal(queue, read)
            for report in self._next(queue, failed):
                if report.client not in told:  # its worker died, and another one trained it again
                    told.add(report.client)
                    yield report
            if failed and not any(member.ahead for member in self._members):
                raise failed[min(failed)]

    def close(self) -> None:
        for member in self._members:
            member.hand.close()
        self._crew.close()

    def _deals(self, portions: Sequence[Portion]) -> Iterator[_Deal]:
        """Several portions at a time where there are many: fewer messages, and at the end nobody waits for long."""
        size = max(1, min(_MOST_PORTIONS, len(portions) // (4 * self._size)))
        for number, first in enumerate(range(0, len(portions), size)):
            yield _Deal(number, portions[first : first + size])

    def _hire(self) -> None:
        while len(self._members) < self._size:
            member = _PoolWorker(self._crew.hire())
            self._tell(member, "build", self._told)
            if self._task is not None:
                self._tell(member, "begin", self._task)
            self._members.append(member)

    def _tell(self, member: _PoolWorker, method: Method, *given: object) -> None:
        member.hand.call(method, *given)
        member.due.append(_Due())

    def _deal(self, queue: deque[_Deal], read: ReadCarry) -> None:
        """Give each member something to do; who has nothing more to train is asked for what it added."""
        if queue:
            self._hire()
        for ahead in range(_AHEAD):
            for member in self._members:
                if queue and member.ahead == ahead:
                    deal = queue.popleft()
                    member.hand.call("train", [(each, each.carries(read)) for each in deal.portions])
                    member.due.append(_Due(deal=deal))
                    member.trained.append(deal)
        for member in self._members if not queue else ():
            if member.trained:
                member.hand.call("collect")
                member.due.append(_Due(summed=member.trained))
                member.trained = []

    def _next(self, queue: deque[_Deal], failed: dict[int, Exception]) -> Sequence[Report]:
        """The next answer: reports, or a partial sum that is added to the round. An error ends the dealing."""
        hands = {member.hand: member for member in self._members if member.due}
        member = hands[self._crew.ready(list(hands))]
        try:
            answer = member.hand.answer()
        except Lost:
            self._lose(member, queue, failed)
            return ()
        due = member.due.popleft()
        if isinstance(answer, Failed):
            if due.deal is None:
                raise answer.error
            failed[due.deal.number] = answer.error
            queue.clear()
        elif due.deal is not None:
            return cast(Sequence[Report], answer)
        elif isinstance(answer, PartialSum) and not failed:
            self._active.aggregator.take(answer)
        return ()

    def _lose(self, member: _PoolWorker, queue: deque[_Deal], failed: dict[int, Exception]) -> None:
        self._members.remove(member)
        member.hand.close()
        again = sorted(member.lost, key=lambda deal: deal.number)
        under_way = next((each.deal for each in member.due if each.deal is not None), None)
        if under_way is not None:
            under_way.tries += 1
            if under_way.tries == _TRIES:
                names = ", ".join(name for portion in under_way.portions for name in portion.clients[:3])
                queue.clear()
                failed[under_way.number] = EdgeflError(
                    f"{_TRIES} workers of the simulation died, one after the other, as they trained clients {names}: look "
                    "for memory that ran out (fewer workers, a smaller simulation.together), or a crash in native code",
                    clients=names,
                )
        queue.extendleft(reversed(again if not failed else ()))
