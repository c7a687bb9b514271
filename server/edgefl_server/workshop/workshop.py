"""The process beside a server that has torch, so that the server has not: it is started where it is needed, and again where
it was killed, and ends where nobody needed it for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from edgefl.config import Federation
from edgefl.contract.server import MEAN, Scalars, ServerOpt
from edgefl.errors import StepError, WorkshopError
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.regions import Placement
from edgefl.wire.tensors import Array, Arrays
from edgefl_server.events import Event, Warned
from edgefl_server.run_spec import RunSpec
from edgefl_server.workshop import messages
from edgefl_server.workshop.line import LineEnded
from edgefl_server.workshop.messages import Again, Compose, Composed, Done, Failed, Told, Word
from edgefl_server.workshop.process import Process

# The functions of a run that its workshop calls: to the server they look like those of its own process.

Ask = Callable[..., Any]
"""``ask(word)``, ``ask(word, beside=True)``: the workshop's answer."""


def found_by(ask: Ask, folder: Path) -> Callable[[messages.Name], object]:
    """What stands on this side for the functions and bundles of a run in ``folder``."""
    placing = _Placing(ask)

    def found(name: messages.Name) -> object:
        match name:
            case messages.Mean():
                return MEAN
            case messages.Bundled(file):
                return read_bundle(folder / "bundles" / file)
            case messages.Placed(tier):
                return partial(placing, tier)
            case messages.Optimizer(exchange, called, state, unfolds, options):
                own = _unfold if unfolds else MEAN.unfold
                return _Elsewhere(called, state, _step, own, options, ask, exchange)
            case messages.Scheduled(exchange, known):
                return _Announced(ask, exchange, {0: known})
            case messages.Judged():
                return partial(_judge, ask)

    return found


def _judge(ask: Ask, weights: Arrays) -> Mapping[str, float]:
    found: Mapping[str, float] = ask(messages.Judge(weights), beside=True)
    return found


class _Placing:
    """The weights of a round go over once, for all tiers that are placed anew."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._asked: tuple[Arrays, int] | None = None
        self._left: dict[str, Placement] = {}

    def __call__(self, tier: str, weights: Arrays, number: int) -> Placement:
        same = self._asked is not None and self._asked[0] is weights and self._asked[1] == number
        if not same or tier not in self._left:
            own = {
                name: array for name, array in weights.items() if "/" not in name
            }  # without the server's state
            self._left, self._asked = dict(self._ask(messages.Place(own, number))), (weights, number)
        placement = self._left.pop(tier)
        if not self._left:
            self._asked = None
        return placement


@dataclass(frozen=True)
class _Announced:
    """A schedule; ``pages`` of it are known, by the position that each begins with."""

    ask: Ask
    exchange: int
    pages: dict[int, Any] = field(default_factory=dict)

    def __call__(self, position: int, rounds: int) -> Scalars:
        first = position - position % messages.PAGE
        if position - first >= len(self.pages.get(first, ())):
            stop = max(position + 1, min(first + messages.PAGE, rounds))
            self.pages[first] = self.ask(messages.Announce(self.exchange, first, stop, rounds))
        scalars: Scalars = self.pages[first][position - first]
        return scalars


def _step(*_: object) -> Any:
    raise NotImplementedError("the step is taken by moved(), in the workshop")


def _unfold(*_: object) -> Any:
    raise NotImplementedError("an update is unfolded by unfolded(), in the workshop")


@dataclass(frozen=True)
class _Elsewhere(ServerOpt):
    """A server's optimizer whose functions are in the workshop."""

    ask: Ask = _step
    exchange: int = 0

    def moved(self, before: Mapping[str, Array], mean: Mapping[str, Array], hyper: Scalars) -> Arrays:
        try:
            return self._asked(messages.Move(self.exchange, dict(before), dict(mean), dict(hyper)))
        except WorkshopError as error:  # the round has no model; the run goes on
            raise StepError(f"the server's step {self.name!r} could not be taken: {error.message}") from error

    def unfolded(self, update: Mapping[str, Array]) -> Arrays:
        return self._asked(messages.Unfold(self.exchange, dict(update))) if self.unfolds else dict(update)

    def _asked(self, word: messages.Word) -> Arrays:
        arrays: Arrays = self.ask(word)
        return arrays


IDLE_S = 30.0
_TRIES = 3


class Workshop:
    """Composes a run, and calls its functions. Any thread may ask; who asks ``beside`` waits for nobody who does not.

    ``process`` may have begun before. Events of :meth:`composed` are told by the thread that calls it, the end of a process
    by whichever thread finds it.
    """

    def __init__(self, process: Process | None = None, *, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._again: Again | None = None
        self._emit: Callable[[Event], None] = lambda event: None
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._asking, self._asked_at = 0, 0.0
        self._closing = threading.Event()
        self._take(process or Process())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none."""
        process = self._process
        return process.pid if process is not None else 0

    def close(self) -> None:
        """End the process, whatever it does."""
        self._closing.set()
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def composed(
        self, federation: Federation, folder: Path, *, device: str, emit: Callable[[Event], None]
    ) -> tuple[RunSpec, str]:
        """The run spec of a federation, with functions that are called here, and where its models are evaluated: ``cpu`` or
        ``cuda``. Its bundles lie in ``folder``. Errors as :func:`edgefl_server.compose.compose`; ``emit`` is told what
        happens."""
        self._emit = emit
        word = Compose(federation, folder, device)
        spec: RunSpec
        about: Composed
        spec, about = self.ask(word, found=found_by(self.ask, folder))
        self._again = Again(word, spec.digest, about.sources)
        return spec, about.processor

    def ask(self, word: Word, *, beside: bool = False, found: Callable[[Any], object] | None = None) -> Any:
        """The answer of the process, or what it raises. WorkshopError where one process after the other ends at it."""
        ended = ""
        for _ in range(_TRIES):
            process = self._ready()
            try:
                if not process.composed and not isinstance(word, Compose):
                    self._compose_again(process)
                with process.locks[beside]:
                    answer = self._exchanged(process, word, beside, found)
                process.composed = True
                return answer
            except BaseException as error:
                gone = isinstance(error, LineEnded)
                if process.broken:
                    ended = self._lost(process, tell=gone)
                if not gone:
                    raise
            finally:
                with self._lock:
                    self._asking, self._asked_at = self._asking - 1, time.monotonic()
        raise WorkshopError(
            f"the process that computes with models ended {_TRIES} times ({ended}) when it was asked to "
            f"{type(word).__name__.lower()}: give the machine more memory, or look who ends it"
        )

    def _ready(self) -> Process:
        """The process, started where there is none; it is not idle before the one who asks is answered."""
        if self._closing.is_set():
            raise WorkshopError("the server's process that computes with models is closed")
        with self._lock:
            process = self._process
        process = self._take(Process()) if process is None else process
        with self._lock:
            self._asking += 1
        return process

    def _take(self, process: Process) -> Process:
        """``process`` is the one that is asked from now on, unless another thread has started one meanwhile."""
        with self._lock:
            if self._process is not None:
                process.end()
                return self._process
            self._process, self._asked_at = process, time.monotonic()
        threading.Thread(target=self._watch, args=(process,), name="workshop", daemon=True).start()
        return process

    def _compose_again(self, process: Process) -> None:
        assert self._again is not None  # nobody has its functions before
        with process.locks[False]:
            if not process.composed:
                self._exchanged(process, self._again, 0)
                process.composed = True

    def _exchanged(
        self, process: Process, word: Word, number: int, found: Callable[[Any], object] | None = None
    ) -> Any:
        line = process.lines[number]
        try:
            line.send(word)
            while isinstance(said := line.receive(found), Told):
                self._emit(said.event)
        except BaseException:
            process.broken = True
            raise
        if isinstance(said, Failed):
            raise said.error
        assert isinstance(said, Done)
        return said.value

    def _lost(self, process: Process, *, tell: bool) -> str:
        """It is asked no more; how it ended, which is told once if that was not to be."""
        with self._lock:
            own = self._process is process
            if own:
                self._process = None
        ended = process.end()
        if own and tell and not self._closing.is_set():
            text = f"the process that computes with models ended ({ended}) while it was needed, and is started again"
            self._emit(Warned(tier="", text=text))
        return ended

    def _watch(self, process: Process) -> None:
        """End it where nobody has asked for a while."""
        wait = self._idle_s
        while not self._closing.wait(wait):
            with self._lock:
                if self._process is not process:
                    return
                left = self._asked_at + self._idle_s - time.monotonic()
                idle = not self._asking and left <= 0
                if idle:
                    self._process = None
            if idle:
                process.end()
                return
            wait = left if left > 0 else self._idle_s
