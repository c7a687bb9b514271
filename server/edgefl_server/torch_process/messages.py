"""Messages between a server and its torch process, and placeholders for the functions of a run spec."""

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
"""Number of a schedule's values in one message."""


class ComposeRequest(msgspec.Struct, frozen=True):
    """First request: compose the run of ``federation`` and write its bundles to ``folder``.

    ``device`` is as for :func:`edgefl.setup.processor.processor`. The answer is the pair (run spec,
    :class:`ComposeResult`).
    """

    federation: Federation
    folder: Path
    device: str


class RecomposeRequest(msgspec.Struct, frozen=True):
    """Request to compose a run again in a new process, from the bundles that an earlier one compiled.

    Attributes:
        compose: Request with which the run was first composed.
        digest: Digest of the run's configuration, which must be the same.
        sources: Contents of the user's files when the run was first composed, by path.
    """

    compose: ComposeRequest
    digest: str
    sources: Mapping[Path, bytes]


class PlaceRequest(msgspec.Struct, frozen=True):
    """Request for the placements in round ``number`` that change from round to round, by tier.

    A placement is a tier's share of the global ``weights``.
    """

    weights: Arrays
    number: int


class OptimizeRequest(msgspec.Struct, frozen=True):
    """Request for a step of the server's optimizer (:meth:`edgefl.contract.server.ServerOpt.moved`).

    The answer is the weights after the step.

    Attributes:
        exchange: Index of the algorithm's exchange.
        before: Weights before the step.
        mean: Average of the updates.
        hyper: Scalars of the round.
    """

    exchange: int
    before: Arrays
    mean: Arrays
    hyper: Scalars


class UnfoldRequest(msgspec.Struct, frozen=True):
    """Request to compute, from a device's update, the arrays that are averaged
    (:meth:`edgefl.contract.server.ServerOpt.unfolded`).

    ``exchange`` is the index of the algorithm's exchange.
    """

    exchange: int
    update: Arrays


class ScheduleRequest(msgspec.Struct, frozen=True):
    """Request for the scalars of the schedule at the positions ``first`` to ``stop - 1``.

    ``rounds`` is the number of rounds of the run, and ``exchange`` the index of the algorithm's exchange. The answer is a
    list with one dictionary of scalars per position.
    """

    exchange: int
    first: int
    stop: int
    rounds: int


class EvaluateRequest(msgspec.Struct, frozen=True):
    """Request to evaluate the model with these ``weights``; the answer has metrics by name."""

    weights: Arrays


WorkRequest = (
    ComposeRequest
    | RecomposeRequest
    | PlaceRequest
    | OptimizeRequest
    | UnfoldRequest
    | ScheduleRequest
    | EvaluateRequest
)


class EventMessage(msgspec.Struct, frozen=True):
    """Message with an event for people; any number of them precede the answer to a request."""

    event: Event


class Done(msgspec.Struct, frozen=True):
    """Successful answer to a request, with its result ``value``."""

    value: object


class Failed(msgspec.Struct, frozen=True):
    """Answer to a request that raised ``error``, converted by :func:`portable`."""

    error: Exception


class WorkFailed(RuntimeError):
    """Error of the torch process whose class exists only there. Its text names that class."""


def portable(error: Exception) -> Exception:
    """Return ``error`` as an exception whose class both processes can import.

    An error of edgefl becomes its nearest class in :mod:`edgefl.errors`. A builtin exception keeps its class if it can
    be pickled; any other becomes WorkFailed. Both of these get the traceback as a note.
    """
    if isinstance(error, EdgeflError):
        # The other side may lack the class, so send its nearest base class in edgefl.errors.
        known = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        details = {name: value if _plain(value) else str(value) for name, value in error.details.items()}
        sent = {**vars(error), "details": details}
        return errors.rebuild_error(
            known, {name: sent[name] for name in ("message", "details", "reason") if name in sent}
        )
    other: Exception = WorkFailed(f"{type(error).__name__}: {error}")
    if getattr(builtins, type(error).__name__, None) is type(error):
        with suppress(Exception):  # an attribute that cannot be pickled
            other = pickle.loads(pickle.dumps(error))
    other.add_note("".join(traceback.format_exception(error)))
    return other


def _plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or type(value) in (str, int, float, bool)


class MeanRef(msgspec.Struct, frozen=True):
    """Placeholder for the server optimizer of FedAvg, which keeps the mean of the updates."""


class BundleRef(msgspec.Struct, frozen=True):
    """Placeholder for a bundle in the run's folder. ``file`` is its path below the folder of bundles."""

    file: str


class PlacementRef(msgspec.Struct, frozen=True):
    """Placeholder for the function that returns a tier's placement (its share of the global weights) in a round."""

    tier: str


class OptimizerRef(msgspec.Struct, frozen=True):
    """Placeholder for the server's optimizer of an exchange (round trip of the algorithm).

    It has the attributes of :class:`edgefl.contract.server.ServerOpt`. ``exchange`` is the index of the exchange.
    """

    exchange: int
    name: str
    state: Mapping[str, float]
    unfolds: bool
    options: frozenset[str]


class ScheduleRef(msgspec.Struct, frozen=True):
    """Placeholder for the schedule (scalars by round) of an exchange (round trip of the algorithm).

    ``exchange`` is the index of the exchange. ``known`` are the scalars at the first positions.
    """

    exchange: int
    known: Sequence[Scalars]


class EvaluationRef(msgspec.Struct, frozen=True):
    """Placeholder for the function that evaluates a model."""


Placeholder = MeanRef | BundleRef | PlacementRef | OptimizerRef | ScheduleRef | EvaluationRef


class ComposeResult(msgspec.Struct, frozen=True):
    """Second part of the answer to :class:`ComposeRequest`, after the run spec.

    Attributes:
        processor: Processor that evaluates models and sums updates: ``cpu`` or ``cuda``.
        sources: Contents of the user's files, by path.
    """

    processor: str
    sources: Mapping[Path, bytes]
