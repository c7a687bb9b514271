"""What a server asks its workshop, what the workshop answers, and what stands for functions in a run spec on its way."""

from __future__ import annotations

import builtins
import pickle
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgefl.config import Federation
from edgefl.contract.schedule import Scalars
from edgefl.wire import errors
from edgefl.wire.errors import EdgeflError
from edgefl.wire.tensors import Arrays
from server.events import Event

PAGE = 256
"""Values of a schedule that go over together."""


@dataclass(frozen=True)
class Compose:
    """First of all: compose the run into ``folder``. ``device`` as :func:`edgefl.setup.processor.processor` takes it."""

    federation: Federation
    folder: Path
    device: str


@dataclass(frozen=True)
class Again:
    """The same in a process that takes another one's place, from the bundles that lie there. ``digest`` is that of the run,
    ``sources`` what files of the user's own said as it was composed."""

    compose: Compose
    digest: str
    sources: Mapping[Path, bytes]


@dataclass(frozen=True)
class Place:
    """Each tier's share that is chosen anew in round ``number``: placements by tier."""

    weights: Arrays
    number: int


@dataclass(frozen=True)
class Move:
    """A step of the server's optimizer of an exchange (:meth:`edgefl.contract.server.ServerOpt.moved`): arrays."""

    exchange: int
    before: Arrays
    mean: Arrays
    hyper: Scalars


@dataclass(frozen=True)
class Unfold:
    """What is averaged in place of an update (:meth:`edgefl.contract.server.ServerOpt.unfolded`): arrays."""

    exchange: int
    update: Arrays


@dataclass(frozen=True)
class Announce:
    """The scalars of an exchange that comes after ``first``, ..., ``stop`` - 1 completed ones, of ``rounds``: a list."""

    exchange: int
    first: int
    stop: int
    rounds: int


@dataclass(frozen=True)
class Judge:
    """How good a model is: metrics by name."""

    weights: Arrays


Word = Compose | Again | Place | Move | Unfold | Announce | Judge


@dataclass(frozen=True)
class Told:
    """Something for people, on the way to an answer."""

    event: Event


@dataclass(frozen=True)
class Done:
    """The answer."""

    value: object


@dataclass(frozen=True)
class Failed:
    """An error in place of an answer: its class by a name that both sides know, ``kept`` where it is one of Python's own."""

    name: str
    message: str
    details: Mapping[str, object]
    kept: bytes = b""
    trace: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failed:
        if not isinstance(error, EdgeflError):
            trace = "".join(traceback.format_exception(error))
            return cls(type(error).__name__, str(error), {}, _kept(error), trace)
        # A class of a room above is told as the one below it that everybody has.
        known = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        details = {name: value if _plain(value) else str(value) for name, value in error.details.items()}
        return cls(known.__name__, error.message, details | {"reason": getattr(error, "reason", "")})

    def error(self) -> Exception:
        """The error, as it was raised there."""
        found = getattr(errors, self.name, None)
        if isinstance(found, type) and issubclass(found, EdgeflError):
            details = dict(self.details)
            reason = details.pop("reason")
            made = found.__new__(found)
            EdgeflError.__init__(made, self.message, **details)
            if reason:
                vars(made)["reason"] = reason
            return made
        if self.kept:
            kept: Exception = pickle.loads(self.kept)
            kept.add_note(self.trace)
            return kept
        return WorkFailed(f"{self.name}: {self.message}", self.trace)


class WorkFailed(RuntimeError):
    """An error of a class that only the workshop has, in its words."""

    def __init__(self, text: str, trace: str) -> None:
        super().__init__(text)
        self.add_note(trace)


def _kept(error: Exception) -> bytes:
    """One of Python's own errors, with all that it holds; empty for any other."""
    if getattr(builtins, type(error).__name__, None) is not type(error):
        return b""
    try:
        kept = pickle.dumps(error)
        pickle.loads(kept)
    except Exception:  # it holds what cannot be pickled
        return b""
    return kept


def _plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or type(value) in (str, int, float, bool)


@dataclass(frozen=True)
class Mean:
    """Stands for FedAvg's server, of which there is one."""


@dataclass(frozen=True)
class Bundled:
    """Stands for a bundle, which lies in the run's folder."""

    file: str


@dataclass(frozen=True)
class Placed:
    """Stands for how a tier is placed."""

    tier: str


@dataclass(frozen=True)
class Optimizer:
    """Stands for the server of an exchange."""

    exchange: int
    name: str
    state: Mapping[str, float]
    unfolds: bool
    options: frozenset[str]


@dataclass(frozen=True)
class Scheduled:
    """Stands for the schedule of an exchange, whose first values are ``known``."""

    exchange: int
    known: Sequence[Scalars]


@dataclass(frozen=True)
class Judged:
    """Stands for the evaluation."""


Name = Mean | Bundled | Placed | Optimizer | Scheduled | Judged


@dataclass(frozen=True)
class Composed:
    """The answer to :class:`Compose`, beside the spec: where models are evaluated and updates summed (``cpu`` or ``cuda``),
    and what files of the user's own said."""

    processor: str
    sources: Mapping[Path, bytes]
