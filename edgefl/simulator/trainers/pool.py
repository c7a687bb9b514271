"""Pool of workers: it deals portions to free workers, and adds up their partial sums.

If a worker dies, others train again its portions since its last partial sum. Equal portions give equal bits, and sums of
whole numbers do not depend on the worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from edgefl.errors import EdgeflError
from edgefl.simulator.trainers.local_rounds import Portion, ReadCarry, Report, RoundTask
from edgefl.simulator.trainers.worker import Method, WorkerFailure, WorkerSetup
from edgefl_server.aggregate.aggregator import PartialSum
from edgefl_server.round_aggregation import RoundAggregation

_AHEAD = 2
"""Deals of a worker at a time: one in training, one queued."""

_MOST_PORTIONS = 16
_TRIES = 3
"""Dead workers after which a deal is not tried again, because the deal is the cause."""


class WorkerLost(Exception):
    """The worker is dead."""


class RemoteWorker(Protocol):
    """Handle of a worker. Answers arrive in the order of the calls."""

    def call(self, method: Method, *given: object) -> None:
        """Call a method without waiting. :meth:`answer` detects a dead worker."""

    def answer(self) -> object:
        """Wait for the next answer: the method's result, or its Failed. Raises WorkerLost if the worker is dead."""

    def close(self) -> None:
        """End the worker."""


class WorkerFactory(Protocol):
    """Factory of workers."""

    def hire(self) -> RemoteWorker:
        """Return a new worker."""

    def share(self, thing: object) -> object:
        """Return a reference to ``thing`` for calls. It is sent once, and mapped by all workers of the machine."""

    def ready(self, workers: Collection[RemoteWorker]) -> RemoteWorker:
        """Wait until one of the workers has an answer, or is dead, and return it."""

    def close(self) -> None: ...


@dataclass(eq=False)
class _Deal:
    """Portions that are dealt together, the ``number``-th of a round."""

    number: int
    portions: Sequence[Portion]
    tries: int = 0


@dataclass(frozen=True)
class _Due:
    """Expected answer of a worker: of ``deal``, or of a partial sum over ``summed``, or of neither."""

    deal: _Deal | None = None
    summed: Sequence[_Deal] | None = None


@dataclass(eq=False)
class _PoolWorker:
    worker: RemoteWorker
    due: deque[_Due] = field(default_factory=deque)
    trained: list[_Deal] = field(default_factory=list)
    """Deals without a requested partial sum."""

    @property
    def ahead(self) -> int:
        return sum(each.deal is not None for each in self.due)

    @property
    def lost(self) -> list[_Deal]:
        """Deals to train again if it dies now."""
        return [*(deal for each in self.due for deal in each.summed or ()), *self.trained]


class Pool:
    """:class:`~edgefl.simulator.trainers.local_rounds.Trainers` with ``size`` workers of ``factory``."""

    def __init__(self, factory: WorkerFactory, size: int, setup: WorkerSetup) -> None:
        self._factory = factory
        self._size = size
        self._setup = factory.share(setup)
        self._task: object | None = None
        self._members: list[_PoolWorker] = []
        self._hire()

    def begin(self, task: RoundTask, active: RoundAggregation) -> None:
        self._task = self._factory.share(task)
        self._active = active
        for member in self._members:
            self._call(member, "begin", self._task)

    def train(self, portions: Sequence[Portion], read: ReadCarry) -> Iterator[Report]:
        queue = deque(self._deals(portions))
        reported: set[str] = set()
        failed: dict[int, Exception] = {}
        while queue or any(member.lost for member in self._members):
            self._deal(queue, read)
            for report in self._next(queue, failed):
                if report.client not in reported:  # its worker died, and another one trained it again
                    reported.add(report.client)
                    yield report
            if failed and not any(member.ahead for member in self._members):
                raise failed[min(failed)]

    def close(self) -> None:
        for member in self._members:
            member.worker.close()
        self._factory.close()

    def _deals(self, portions: Sequence[Portion]) -> Iterator[_Deal]:
        """Yield several portions at a time if there are many: fewer messages, and short waits at the end."""
        size = max(1, min(_MOST_PORTIONS, len(portions) // (4 * self._size)))
        for number, first in enumerate(range(0, len(portions), size)):
            yield _Deal(number, portions[first : first + size])

    def _hire(self) -> None:
        while len(self._members) < self._size:
            member = _PoolWorker(self._factory.hire())
            self._call(member, "build", self._setup)
            if self._task is not None:
                self._call(member, "begin", self._task)
            self._members.append(member)

    def _call(self, member: _PoolWorker, method: Method, *given: object) -> None:
        member.worker.call(method, *given)
        member.due.append(_Due())

    def _deal(self, queue: deque[_Deal], read: ReadCarry) -> None:
        """Give each worker a deal. A worker without further deals gets a request for its partial sum."""
        if queue:
            self._hire()
        for ahead in range(_AHEAD):
            for member in self._members:
                if queue and member.ahead == ahead:
                    deal = queue.popleft()
                    member.worker.call("train", [(each, each.carries(read)) for each in deal.portions])
                    member.due.append(_Due(deal=deal))
                    member.trained.append(deal)
        for member in self._members if not queue else ():
            if member.trained:
                member.worker.call("collect")
                member.due.append(_Due(summed=member.trained))
                member.trained = []

    def _next(self, queue: deque[_Deal], failed: dict[int, Exception]) -> Sequence[Report]:
        """Return the reports of the next answer, or add its partial sum to the round. An error ends the dealing."""
        workers = {member.worker: member for member in self._members if member.due}
        member = workers[self._factory.ready(list(workers))]
        try:
            answer = member.worker.answer()
        except WorkerLost:
            self._lose(member, queue, failed)
            return ()
        due = member.due.popleft()
        if isinstance(answer, WorkerFailure):
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
        member.worker.close()
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
