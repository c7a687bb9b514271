"""Messages between a server and its workshop, and placeholders for the functions of a run spec."""

from __future__ import annotations

import builtins
import pickle
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from edgefl import errors
from edgefl.config import Federation
from edgefl.contract.server import Scalars
from edgefl.errors import EdgeflError
from edgefl.wire.tensors import Arrays
from edgefl_server.events import Event

PAGE = 256
"""Values of a schedule that go over together."""


class Compose(msgspec.Struct, frozen=True):
    """First of all: compose the run into ``folder``. ``device`` as :func:`edgefl.setup.processor.processor` takes it."""

    federation: Federation
    folder: Path
    device: str


class Again(msgspec.Struct, frozen=True):
    """Compose the run again in a new process, from the bundles in the folder.

    ``digest`` identifies the run. ``sources`` has the contents of the user's files when the run was composed.
    """

    compose: Compose
    digest: str
    sources: Mapping[Path, bytes]


class Place(msgspec.Struct, frozen=True):
    """Each tier's share that is chosen anew in round ``number``: placements by tier."""

    weights: Arrays
    number: int


class Move(msgspec.Struct, frozen=True):
    """A step of the server's optimizer of an exchange (:meth:`edgefl.contract.server.ServerOpt.moved`): arrays."""

    exchange: int
    before: Arrays
    mean: Arrays
    hyper: Scalars


class Unfold(msgspec.Struct, frozen=True):
    """Arrays to average instead of an update (:meth:`edgefl.contract.server.ServerOpt.unfolded`)."""

    exchange: int
    update: Arrays


class Announce(msgspec.Struct, frozen=True):
    """The scalars of an exchange that comes after ``first``, ..., ``stop`` - 1 completed ones, of ``rounds``: a list."""

    exchange: int
    first: int
    stop: int
    rounds: int


class Judge(msgspec.Struct, frozen=True):
    """Evaluate a model; the answer has metrics by name."""

    weights: Arrays


Word = Compose | Again | Place | Move | Unfold | Announce | Judge


class Told(msgspec.Struct, frozen=True):
    """Something for people, on the way to an answer."""

    event: Event


class Done(msgspec.Struct, frozen=True):
    """The answer."""

    value: object


class Failed(msgspec.Struct, frozen=True):
    """Error instead of an answer, as :func:`portable` made it."""

    error: Exception


class WorkFailed(RuntimeError):
    """Error of a class that only the workshop has, with its text."""


def portable(error: Exception) -> Exception:
    """Return ``error`` in a class that both sides have, with a note of its trace if it is not one of ours."""
    if isinstance(error, EdgeflError):
        # The other side may lack the class, so send its nearest base class in edgefl.errors.
        known = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        details = {name: value if _plain(value) else str(value) for name, value in error.details.items()}
        sent = {**vars(error), "details": details}
        return errors.remade(
            known, {name: sent[name] for name in ("message", "details", "reason") if name in sent}
        )
    other: Exception = WorkFailed(f"{type(error).__name__}: {error}")
    if getattr(builtins, type(error).__name__, None) is type(error):
        with suppress(Exception):  # it holds what cannot be pickled
            other = pickle.loads(pickle.dumps(error))
    other.add_note("".join(traceback.format_exception(error)))
    return other


def _plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or type(value) in (str, int, float, bool)


class Mean(msgspec.Struct, frozen=True):
    """Placeholder for the server of FedAvg."""


class Bundled(msgspec.Struct, frozen=True):
    """Placeholder for a bundle in the run's folder."""

    file: str


class Placed(msgspec.Struct, frozen=True):
    """Placeholder for the placement of a tier."""

    tier: str


class Optimizer(msgspec.Struct, frozen=True):
    """Placeholder for the server of an exchange."""

    exchange: int
    name: str
    state: Mapping[str, float]
    unfolds: bool
    options: frozenset[str]


class Scheduled(msgspec.Struct, frozen=True):
    """Placeholder for the schedule of an exchange; its first values are ``known``."""

    exchange: int
    known: Sequence[Scalars]


class Judged(msgspec.Struct, frozen=True):
    """Placeholder for the evaluation."""


Name = Mean | Bundled | Placed | Optimizer | Scheduled | Judged


class Composed(msgspec.Struct, frozen=True):
    """Answer to :class:`Compose`, with the spec.

    ``processor`` evaluates models and sums updates (``cpu`` or ``cuda``). ``sources`` has the contents of the user's files.
    """

    processor: str
    sources: Mapping[Path, bytes]
