"""Pool of workers: distributes portions (groups of clients) to free workers, and adds up their partial sums.

If a worker dies, other workers repeat its portions since its last partial sum. Equal portions give equal bits, and
sums of integers do not depend on the worker.
"""

from __future__ import annotations

import atexit
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from queue import SimpleQueue

from edgefl.config import Federation
from edgefl.data.dataset import Dataset
from edgefl.errors import EdgeflError, not_on_windows
from edgefl.setup.runs import code_of
from edgefl.simulator.clients import ClientData
from edgefl.simulator.functions import SimulationPlan
from edgefl.simulator.trainers.local_rounds import (
    ClientPortion,
    LocalRounds,
    ReadCarry,
    Report,
    RoundTask,
    Trainers,
)
from edgefl.simulator.trainers.worker import (
    CollectCommand,
    TrainCommand,
    WorkerFailure,
    WorkerMessage,
    WorkerSetup,
)
from edgefl.system.processes import start_module
from edgefl_server.aggregate.aggregator import PartialSum
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.workers.process import ProcessLauncher
from edgefl_server.workers.protocol import Died, WorkerHandle, WorkerLauncher
from edgefl_server.workers.ray_cluster import RayLauncher

_AHEAD = 2
"""Deals of a worker at a time: one in training, one queued."""

_MOST_PORTIONS = 16
_TRIES = 3
"""Dead workers after which a deal is not tried again, because the deal is the cause."""


class ForkingLauncher(ProcessLauncher):
    """Factory of worker processes, which are forked from a template process. The template keeps running for later
    simulations.
    """

    def __init__(self) -> None:
        super().__init__("simulation", send_s=0.0)

    def start(self, there: socket.socket) -> ForkedProcess:
        """Fork a worker that reads commands from the socket ``there``. Start the template process if it does not run.

        Raises:
            ConfigError: on Windows.
        """
        if sys.platform == "win32":
            raise not_on_windows("`simulation.workers`")
        try:
            socket.send_fds(_template(), [b"w"], [there.fileno()])
        except OSError:  # somebody ended it
            _template.cache_clear()
            socket.send_fds(_template(), [b"w"], [there.fileno()])
        return ForkedProcess()


class ForkedProcess:
    """Worker process. It is a child of the template, so it ends when its pipe closes; :meth:`kill` and :meth:`wait` do
    nothing.
    """

    pid = 0

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        return 0


@cache
def _template() -> socket.socket:
    """Start the template process in a session of its own, so that Ctrl-C does not reach it. Return the socket to it."""
    here, there = socket.socketpair()
    with there:
        process = start_module("edgefl.simulator.trainers.template", there)
    atexit.register(_end, here, process)
    return here


def _end(own: socket.socket, process: subprocess.Popen[bytes]) -> None:
    own.close()
    process.wait()


@dataclass(eq=False)
class _PortionBatch:
    """Portions that are sent to a worker together. ``number``: position of the batch in the round; ``tries``: number of
    workers that died while they trained it.
    """

    number: int
    portions: Sequence[ClientPortion]
    tries: int = 0


@dataclass(eq=False)
class _Member:
    """Worker of the pool, and receiver of its messages.

    Attributes:
        messages: Queue of the pool, with pairs of a worker and its message.
        dealt: Batches of clients that were sent to the worker and not reported, in order.
        trained: Batches whose sum of updates is still to be requested.
        summed: For each requested sum of updates, its batches.
        handle: Handle of the worker.
    """

    messages: SimpleQueue[tuple[_Member, WorkerMessage | Died]]
    dealt: deque[_PortionBatch] = field(default_factory=deque)
    trained: list[_PortionBatch] = field(default_factory=list)
    summed: deque[list[_PortionBatch]] = field(default_factory=deque)
    handle: WorkerHandle = field(init=False)

    def put(self, message: WorkerMessage | Died, /) -> None:
        self.messages.put((self, message))

    @property
    def lost(self) -> list[_PortionBatch]:
        """Batches of clients that must be trained again if this worker dies now."""
        return [*(deal for each in self.summed for deal in each), *self.trained]


class TrainerPool:
    """Implementation of :class:`~edgefl.simulator.trainers.local_rounds.Trainers` by worker processes or actors.

    Args:
        launcher: Starts the workers when they are needed.
        size: Number of workers.
        setup: Settings from which each worker builds its functions.
    """

    def __init__(self, launcher: WorkerLauncher, size: int, setup: WorkerSetup) -> None:
        self._launcher = launcher
        self._size = size
        self._task: object | None = None
        self._members: list[_Member] = []
        self._messages: SimpleQueue[tuple[_Member, WorkerMessage | Died]] = SimpleQueue()
        try:
            self._setup = launcher.share(setup)
            self._hire()
        except BaseException:
            self.close()
            raise

    def begin(self, task: RoundTask, active: RoundAggregation) -> None:
        self._task = self._launcher.share(task)
        self._active = active
        for member in self._members:
            member.handle.send(self._task)

    def train(self, portions: Sequence[ClientPortion], read: ReadCarry) -> Iterator[Report]:
        queue = deque(self._deals(portions))
        reported: set[str] = set()
        failed: dict[int, Exception] = {}
        while queue or any(member.lost for member in self._members):
            self._deal(queue, read)
            for report in self._next(queue, failed):
                if report.client not in reported:  # its worker died, and another one trained it again
                    reported.add(report.client)
                    yield report
            if failed and not any(member.dealt for member in self._members):
                raise failed[min(failed)]

    def close(self) -> None:
        """Kill all workers and release the shared data."""
        for member in self._members:
            member.handle.kill()
        self._launcher.close()

    def _deals(self, portions: Sequence[ClientPortion]) -> Iterator[_PortionBatch]:
        """Yield the groups of clients in ``portions`` as batches, one for each message to a worker.

        Batches are large to save messages, but small enough that workers finish at about the same time.
        """
        size = max(1, min(_MOST_PORTIONS, len(portions) // (4 * self._size)))
        for number, first in enumerate(range(0, len(portions), size)):
            yield _PortionBatch(number, portions[first : first + size])

    def _hire(self) -> None:
        while len(self._members) < self._size:
            member = _Member(self._messages)
            member.handle = self._launcher.launch(self._setup, member)
            if self._task is not None:
                member.handle.send(self._task)
            self._members.append(member)

    def _deal(self, queue: deque[_PortionBatch], read: ReadCarry) -> None:
        """Send batches from ``queue`` to workers that have few unfinished ones.

        If no batch is left, request each worker's sum of updates. ``read`` loads a client's state by its row number.
        """
        if queue:
            self._hire()
        for ahead in range(_AHEAD):
            for member in self._members:
                if queue and len(member.dealt) == ahead:
                    deal = queue.popleft()
                    member.handle.send(
                        TrainCommand(deal.number, [(each, each.carries(read)) for each in deal.portions])
                    )
                    member.dealt.append(deal)
                    member.trained.append(deal)
        for member in self._members if not queue else ():
            if member.trained:
                member.handle.send(CollectCommand())
                member.summed.append(member.trained)
                member.trained = []

    def _next(self, queue: deque[_PortionBatch], failed: dict[int, Exception]) -> Sequence[Report]:
        """Wait for a message of a worker. Return the reports in it, or add the worker's sum of updates to the round.

        An error is stored in ``failed`` by the number of its batch, and clears ``queue``.
        """
        member, message = self._messages.get()
        if member not in self._members:
            return ()
        match message:
            case list():
                member.dealt.popleft()
                return message
            case WorkerFailure(error, number):
                if number is None:
                    raise error
                member.dealt.popleft()
                failed[number] = error
                queue.clear()
            case Died():
                self._lose(member, queue, failed)
            case _:
                member.summed.popleft()
                if isinstance(message, PartialSum) and not failed:
                    self._active.aggregator.take(message)
        return ()

    def _lose(self, member: _Member, queue: deque[_PortionBatch], failed: dict[int, Exception]) -> None:
        self._members.remove(member)
        member.handle.kill()
        again = sorted(member.lost, key=lambda deal: deal.number)
        if member.dealt:
            under_way = member.dealt[0]
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


@dataclass
class InProcessTrainer:
    """Implementation of :class:`~edgefl.simulator.trainers.local_rounds.Trainers` in this process.

    It trains one group of clients after the other.
    """

    rounds: LocalRounds
    _active: RoundAggregation | None = field(default=None, init=False)

    def begin(self, task: RoundTask, active: RoundAggregation) -> None:
        self.rounds.begin(task)
        self._active = active

    def train(self, portions: Sequence[ClientPortion], read: ReadCarry) -> Iterator[Report]:
        assert self._active is not None, "begin() comes first"
        for portion in portions:
            yield from self.rounds.train(self._active, portion, portion.carries(read))

    def close(self) -> None:
        """Do nothing."""


def trainers(plan: SimulationPlan, federation: Federation, dataset: Dataset, clients: ClientData) -> Trainers:
    """Return the trainers that the table ``simulation`` requests: this process, a pool of processes, or Ray actors.

    The caller must close them.

    Args:
        plan: Plan of the simulation.
        federation: Configuration.
        dataset: Dataset of the server's evaluation, and of the clients if they share one.
        clients: Training data of the clients.

    Raises:
        ConfigError: If Ray is required but not available.
    """
    table = federation.simulation
    if table.workers == 1 and not table.ray:
        return InProcessTrainer(LocalRounds(plan.spec, plan.functions, clients, table.together))
    gpus = 1 if table.device == "cuda" else 0
    launcher = RayLauncher(table.ray, table.workers, "simulation", gpus) if table.ray else ForkingLauncher()
    return TrainerPool(
        launcher, table.workers, WorkerSetup(federation, dataset, clients, code_of(federation))
    )
