"""Messages between an agent and its engine's process. State stays in the process; messages refer to tensors by number."""

from __future__ import annotations

import msgspec

from edgefl.wire.bundle.graphs import Graph
from edgefl_device.sandbox.confine import Confinement


class OpenEngine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message to the engine's process: the engine to open, its threads, and the rights of the process."""

    engine: str
    threads: int
    most_threads: int
    pages: str
    confinement: Confinement


class EngineOpened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer with facts about the opened engine. ``missing`` lists protections that the system does not support."""

    name: str
    version: str
    format: str
    thread_counts: tuple[int, ...]
    missing: tuple[str, ...]


class LoadGraph(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request to load a graph, whose ``nbytes`` bytes follow. Later requests refer to it by ``number``."""

    number: int
    graph: Graph
    nbytes: int
    threads: int


class RunGraph(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request to run graph ``number``. ``state`` maps port names to tensors; the other inputs follow in the order of
    ports.
    """

    number: int
    state: dict[str, int]


class GraphRan(msgspec.Struct, frozen=True, kw_only=True, tag="Ran"):
    """Answer to RunGraph: new state by port name. The other outputs follow in the order of ports."""

    state: dict[str, int]


class ReadState(msgspec.Struct, frozen=True, kw_only=True, tag="Read"):
    """Request for the content of state tensors. ``state`` maps port names to the tensors' numbers; the answer is
    :class:`StateTensors`.
    """

    state: dict[str, int]


class TensorHeader(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class StateTensors(msgspec.Struct, frozen=True, kw_only=True, tag="Tensors"):
    """Descriptions of tensors, whose bytes follow in this order; a request to create state, or the answer to ReadState."""

    tensors: tuple[TensorHeader, ...]


class StateCreated(msgspec.Struct, frozen=True, kw_only=True, tag="Written"):
    """Answer to :class:`StateTensors`: the number of each new state tensor, by name."""

    state: dict[str, int]


class FreeState(msgspec.Struct, frozen=True, kw_only=True, tag="Drop"):
    """Request to free the state tensors and graphs with these numbers; it has no answer."""

    state: tuple[int, ...]
    graphs: tuple[int, ...]


class GraphLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer that a graph was loaded."""


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag="EngineError"):
    """Answer that a request failed. ``code`` is the exit code of an expected error, 0 for one of the engine's own."""

    code: int
    text: str


EngineRequest = OpenEngine | LoadGraph | RunGraph | ReadState | StateTensors | FreeState
EngineAnswer = EngineOpened | GraphLoaded | GraphRan | StateCreated | StateTensors | RequestFailed
