"""Client of the torch process, which keeps torch out of the server's memory.

The process starts on demand, restarts after a kill and ends when it is idle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from edgefl.config import Federation
from edgefl.contract.server import MEAN, Scalars, ServerOpt
from edgefl.errors import ServerStepError, TorchProcessError
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.regions import Placement
from edgefl.wire.tensors import Array, Arrays
from edgefl_server.events import EventListener, Warned
from edgefl_server.run_spec import RunSpec
from edgefl_server.torch_process import messages
from edgefl_server.torch_process.connection import ConnectionEnded
from edgefl_server.torch_process.messages import (
    ComposeRequest,
    ComposeResult,
    Done,
    EventMessage,
    Failed,
    RecomposeRequest,
    WorkRequest,
)
from edgefl_server.torch_process.process import Process

# Functions of a run that the torch process calls. The server uses them like functions of its own process.


class RunResolver:
    """Resolver of placeholders in the run spec that the torch process sent.

    Bundles are read from ``folder``, the folder of the run. Functions become objects that call ``process``.
    """

    def __init__(self, process: TorchProcess, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._placing = _RoundPlacements(process)

    def resolve(self, name: messages.Placeholder) -> object:
        """Return the object that the placeholder ``name`` represents.

        Raises:
            BundleError: If a bundle file cannot be read.
        """
        match name:
            case messages.MeanRef():
                return MEAN
            case messages.BundleRef(file):
                return read_bundle(self._folder / "bundles" / file)
            case messages.PlacementRef(tier):
                return partial(self._placing, tier)
            case messages.OptimizerRef(exchange, called, state, unfolds, options):
                own = _unfold if unfolds else MEAN.unfold
                return _RemoteOptimizer(called, state, _step, own, options, self._process, exchange)
            case messages.ScheduleRef(exchange, known):
                return _RemoteSchedule(self._process, exchange, {0: known})
            case messages.EvaluationRef():
                return partial(_judge, self._process)


def _judge(process: TorchProcess, weights: Arrays) -> Mapping[str, float]:
    metrics: Mapping[str, float] = process.call(messages.EvaluateRequest(weights), beside=True)
    return metrics


class _RoundPlacements:
    """Function that returns a tier's placement (its share of the global weights) in a round.

    One request to the torch process returns those of all tiers whose entries change between rounds; the others are
    cached for the following calls.
    """

    def __init__(self, process: TorchProcess) -> None:
        self._process = process
        self._request: tuple[Arrays, int] | None = None
        self._left: dict[str, Placement] = {}

    def __call__(self, tier: str, weights: Arrays, number: int) -> Placement:
        same = self._request is not None and self._request[0] is weights and self._request[1] == number
        if not same or tier not in self._left:
            own = {
                name: array for name, array in weights.items() if "/" not in name
            }  # without the server's state
            self._left, self._request = (
                dict(self._process.call(messages.PlaceRequest(own, number))),
                (weights, number),
            )
        placement = self._left.pop(tier)
        if not self._left:
            self._request = None
        return placement


@dataclass(frozen=True)
class _RemoteSchedule:
    """Schedule of an exchange (round trip of the algorithm), whose scalars the torch process computes.

    ``exchange`` is the index of the exchange in the run spec. ``pages`` caches the scalars in groups of
    :data:`messages.PAGE` positions, by the first position of a group.
    """

    process: TorchProcess
    exchange: int
    pages: dict[int, Any] = field(default_factory=dict)

    def __call__(self, position: int, rounds: int) -> Scalars:
        first = position - position % messages.PAGE
        if position - first >= len(self.pages.get(first, ())):
            stop = max(position + 1, min(first + messages.PAGE, rounds))
            self.pages[first] = self.process.call(
                messages.ScheduleRequest(self.exchange, first, stop, rounds)
            )
        scalars: Scalars = self.pages[first][position - first]
        return scalars


def _step(*_: object) -> Any:
    raise NotImplementedError("the step is taken by moved(), in the torch process")


def _unfold(*_: object) -> Any:
    raise NotImplementedError("an update is unfolded by unfolded(), in the torch process")


@dataclass(frozen=True)
class _RemoteOptimizer(ServerOpt):
    """Server optimizer whose functions run in the torch process."""

    process: TorchProcess | None = None
    exchange: int = 0

    def moved(self, before: Mapping[str, Array], mean: Mapping[str, Array], hyper: Scalars) -> Arrays:
        try:
            return self._request(
                messages.OptimizeRequest(self.exchange, dict(before), dict(mean), dict(hyper))
            )
        except TorchProcessError as error:  # only this round fails
            raise ServerStepError(
                f"the server's step {self.name!r} could not be taken: {error.message}"
            ) from error

    def unfolded(self, update: Mapping[str, Array]) -> Arrays:
        return (
            self._request(messages.UnfoldRequest(self.exchange, dict(update)))
            if self.unfolds
            else dict(update)
        )

    def _request(self, request: messages.WorkRequest) -> Arrays:
        assert self.process is not None
        arrays: Arrays = self.process.call(request)
        return arrays


IDLE_S = 30.0
_TRIES = 3


class TorchProcess:
    """Client of a child process with torch, which composes a run and calls its functions. Thread-safe.

    The child starts on demand, and again if it was killed. Requests with ``beside`` have a connection of their own, so
    that they do not wait for the other requests.

    Args:
        process: torch process that was started before; None starts one.
        idle_s: seconds without a request after which the process ends.
    """

    def __init__(self, process: Process | None = None, *, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._recompose_request: RecomposeRequest | None = None
        self._listener: EventListener | None = None
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._calls, self._called_at = 0, 0.0
        self._closing = threading.Event()
        self._take(process or Process())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process ID of the torch process; 0 if none runs."""
        process = self._process
        return process.pid if process is not None else 0

    def close(self) -> None:
        """End the process, even during a computation. Later calls raise TorchProcessError."""
        self._closing.set()
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def composed(
        self, federation: Federation, folder: Path, *, device: str, listener: EventListener
    ) -> tuple[RunSpec, str]:
        """Compose a federation in the torch process, and return the run.

        Args:
            federation: the federation to compose.
            folder: folder of the run, which receives the bundles.
            device: processor, as for :func:`edgefl.setup.processor.processor`.
            listener: receives events. The caller's thread reports those of composing, any thread the end of a process.

        Returns:
            The run spec, whose functions call the torch process, and the processor that evaluates models: ``cpu`` or
            ``cuda``.

        Raises:
            EdgeflError: as :func:`edgefl_server.compose.compose`.
            TorchProcessError: If the process ended repeatedly.
        """
        self._listener = listener
        request = ComposeRequest(federation, folder, device)
        spec: RunSpec
        about: ComposeResult
        spec, about = self.call(request, resolver=RunResolver(self, folder))
        self._recompose_request = RecomposeRequest(request, spec.digest, about.sources)
        return spec, about.processor

    def call(self, request: WorkRequest, *, beside: bool = False, resolver: RunResolver | None = None) -> Any:
        """Send a request to the process and return its answer. The process is started if none runs.

        If it ends during the request, the request is repeated in a new one, up to three times in all.

        Args:
            request: The request.
            beside: True to use the second connection, so that it does not wait for other requests.
            resolver: Resolver of placeholders in the answer.

        Raises:
            TorchProcessError: If every process that tried the request ended, or after :meth:`close`.
            Exception: The error that the request caused in the process.
        """
        ended = ""
        for _ in range(_TRIES):
            process = self._ready()
            try:
                if not process.composed and not isinstance(request, ComposeRequest):
                    self._compose_again(process)
                with process.locks[beside]:
                    answer = self._exchange(process, request, beside, resolver)
                process.composed = True
                return answer
            except BaseException as error:
                gone = isinstance(error, ConnectionEnded)
                if process.broken:
                    ended = self._drop_process(process, warn=gone)
                if not gone:
                    raise
            finally:
                with self._lock:
                    self._calls, self._called_at = self._calls - 1, time.monotonic()
        raise TorchProcessError(
            f"the process that computes with models ended {_TRIES} times ({ended}) when it was asked to "
            f"{type(request).__name__.removesuffix('Request').lower()}: give the machine more memory, or look who ends it"
        )

    def _ready(self) -> Process:
        """Return the running process, which is started if there is none, and count one more open request.

        The caller must decrease the count afterwards.

        Raises:
            TorchProcessError: After :meth:`close`.
        """
        if self._closing.is_set():
            raise TorchProcessError("the server's process that computes with models is closed")
        with self._lock:
            process = self._process
        process = self._take(Process()) if process is None else process
        with self._lock:
            self._calls += 1
        return process

    def _take(self, process: Process) -> Process:
        """Make ``process`` the current one and return it.

        If another thread has already set a current process, end ``process`` and return the current one.
        """
        with self._lock:
            if self._process is not None:
                process.end()
                return self._process
            self._process, self._called_at = process, time.monotonic()
        threading.Thread(target=self._watch, args=(process,), name="torch_process", daemon=True).start()
        return process

    def _compose_again(self, process: Process) -> None:
        assert self._recompose_request is not None  # the functions of a run exist only once it is composed
        with process.locks[False]:
            if not process.composed:
                self._exchange(process, self._recompose_request, 0)
                process.composed = True

    def _exchange(
        self, process: Process, request: WorkRequest, number: int, resolver: RunResolver | None = None
    ) -> Any:
        connection = process.connections[number]
        try:
            connection.send(request)
            while isinstance(message := connection.receive(resolver), EventMessage):
                if self._listener is not None:
                    self._listener.emit(message.event)
        except BaseException:
            process.broken = True
            raise
        if isinstance(message, Failed):
            raise message.error
        assert isinstance(message, Done)
        return message.value

    def _drop_process(self, process: Process, *, warn: bool) -> str:
        """End and forget a broken process, and return a description of its end.

        ``warn``: emit a warning, unless another thread has dropped the process before.
        """
        with self._lock:
            own = self._process is process
            if own:
                self._process = None
        ended = process.end()
        if own and warn and self._listener is not None and not self._closing.is_set():
            text = f"the process that computes with models ended ({ended}) while it was needed, and is started again"
            self._listener.emit(Warned(tier="", text=text))
        return ended

    def _watch(self, process: Process) -> None:
        """End ``process`` once no request was made for ``idle_s`` seconds. Runs on a thread of its own, and returns
        after that.
        """
        wait = self._idle_s
        while not self._closing.wait(wait):
            with self._lock:
                if self._process is not process:
                    return
                left = self._called_at + self._idle_s - time.monotonic()
                idle = not self._calls and left <= 0
                if idle:
                    self._process = None
            if idle:
                process.end()
                return
            wait = left if left > 0 else self._idle_s
