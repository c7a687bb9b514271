"""Messages between an agent and its engine's process. State stays with the engine, and has numbers here."""

from __future__ import annotations

import msgspec

from edgefl.wire.bundle.graphs import Graph
from edgefl_device.sandbox.confine import Confinement


class OpenEngine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first word: which engine, and what it may."""

    engine: str
    threads: int
    most_threads: int
    pages: str
    confinement: Confinement


class EngineOpened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Facts about the opened engine. ``missing``: rights that the system cannot take away."""

    name: str
    version: str
    format: str
    thread_counts: tuple[int, ...]
    missing: tuple[str, ...]


class LoadGraph(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load a graph; so many bytes of it follow. It is called ``number`` from now on."""

    number: int
    graph: Graph
    nbytes: int
    threads: int


class RunGraph(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a graph on state by the names of its ports; its other inputs follow, in the order of its ports."""

    number: int
    state: dict[str, int]


class Ran(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The state after a run; its other outputs follow, in the order of its ports."""

    state: dict[str, int]


class Read(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send the tensors of a state."""

    state: dict[str, int]


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class Tensors(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tensors follow, in this order."""

    tensors: tuple[Tensor, ...]


class Written(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The state that was made of tensors."""

    state: dict[str, int]


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget state and graphs; nothing is answered."""

    state: tuple[int, ...]
    graphs: tuple[int, ...]


class GraphLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It was done."""


class EngineError(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It was not. ``code``: the exit code of an expected error, 0 for one of the engine's own."""

    code: int
    text: str


EngineRequest = OpenEngine | LoadGraph | RunGraph | Read | Tensors | Drop
EngineAnswer = EngineOpened | GraphLoaded | Ran | Written | Tensors | EngineError
