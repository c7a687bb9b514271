"""The agent's side: an engine whose graphs run in another process, that is started when it is needed and ended at rest."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.errors import BundleError, ConfigError, RoundDeclined
from edgefl.wire.bundle.manifest import Graph, Port
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import CRASHED
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine import ENGINES, MOST_THREADS
from edgefl_device.engine.base import Engine, Outputs, State
from edgefl_device.sandbox.confine import Confinement
from edgefl_device.sandbox.messages import (
    GraphLoaded,
    LoadGraph,
    Ran,
    Read,
    RunGraph,
    Tensor,
    Tensors,
    Written,
)
from edgefl_device.sandbox.process import START_S, EngineProcess, SandboxSettings


class SandboxedEngine:
    """Runs the graphs of another engine in a process that may little. Results are the same to the last bit."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._process: EngineProcess | None = None
        opened = self._running().opened
        self.name, self.version, self.format = opened.name, opened.version, opened.format
        self.thread_counts = opened.thread_counts
        self.missing = opened.missing
        """What the system does not confine, and why."""

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> SandboxedGraph:
        process = self._running()
        number = process.number_graph()
        word = LoadGraph(number=number, graph=graph, nbytes=len(artifact), threads=threads)
        answer = process.ask(
            word, [np.frombuffer(artifact, np.uint8)], within_s=max(START_S, self._settings.step_s)
        )
        if not isinstance(answer, GraphLoaded):
            raise process.over(ValueError("another answer"))
        return SandboxedGraph(process, graph, number)

    def read_state(self, state: State) -> Arrays:
        if not state:
            return {}
        process = next(iter(state.values())).process
        answer = process.ask(Read(state=_numbers(process, state)))
        expected = tuple(value.told(name) for name, value in state.items())
        if not isinstance(answer, Tensors) or answer.tensors != expected:
            raise process.over(ValueError("another answer"))
        return {each.name: process.array(each.dtype, each.shape) for each in expected}

    def write_state(self, arrays: Mapping[str, Array]) -> State:
        process = self._running()
        made = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        word = Tensors(
            tensors=tuple(Tensor(name=name, dtype=a.dtype.str, shape=a.shape) for name, a in made.items())
        )
        answer = process.ask(word, list(made.values()))
        if not isinstance(answer, Written) or answer.state.keys() != made.keys():
            raise process.over(ValueError("another answer"))
        return {
            name: process.hold(number, made[name].dtype.str, made[name].shape)
            for name, number in answer.state.items()
        }

    @property
    def confinement(self) -> Confinement:
        """Rights of its process."""
        return self._settings.confinement()

    def used_bytes(self) -> int:
        """Return the anonymous memory of the process above its idle self; 0 if there is none."""
        return self._process.used_bytes() if self._process is not None else 0

    def rest(self) -> None:
        """Give back what waiting does not need: the process. The next round starts another."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _running(self) -> EngineProcess:
        if self._process is None or self._process.ended:
            self._process = EngineProcess(self._settings)
        return self._process


class SandboxedGraph:
    """A graph in the engine's process."""

    def __init__(self, process: EngineProcess, graph: Graph, number: int) -> None:
        self._process = process
        self._graph = graph
        self._number = number
        self._reads = {port.name for port in graph.inputs if port.role == "state"}
        self._fed = [port for port in graph.inputs if port.role != "state"]
        self._gives = [port for port in graph.outputs if port.role != "state"]
        self._keeps = {port.name: port for port in graph.outputs if port.role == "state"}
        weakref.finalize(self, process.forget_graph, number)

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        process = self._process
        read = {name: value for name, value in state.items() if name in self._reads}
        arrays = [_fitting(port, feeds[port.name]) for port in self._fed]
        answer = process.ask(RunGraph(number=self._number, state=_numbers(process, read)), arrays)
        if not isinstance(answer, Ran) or answer.state.keys() != self._keeps.keys():
            raise process.over(ValueError("another answer"))
        outputs = {port.name: process.array(port.dtype, port.shape) for port in self._gives}
        state = {
            name: process.hold(answer.state[name], port.dtype, port.shape)
            for name, port in self._keeps.items()
        }
        return Outputs(state, outputs)


def rest(engine: Engine) -> None:
    """Let an engine in a process of its own end that."""
    if isinstance(engine, SandboxedEngine):
        engine.rest()


def missing(engine: Engine) -> tuple[str, ...]:
    """Return the rights that the system cannot take from an engine's own process, and why."""
    return engine.missing if isinstance(engine, SandboxedEngine) else ()


def confinement(engine: Engine) -> Confinement | None:
    """Return the rights of processes that run graphs for ``engine``; None for those of this process."""
    return engine.confinement if isinstance(engine, SandboxedEngine) else None


def used_bytes(engine: Engine | None) -> int:
    """Return the anonymous memory of an engine's own process above its idle self; 0 if it has none."""
    return engine.used_bytes() if isinstance(engine, SandboxedEngine) else 0


def _fitting(port: Port, array: Array) -> Array:
    made: Array = np.asarray(array, port.dtype, order="C")
    if made.size != math.prod(port.shape):
        raise BundleError(
            f"{port.name} should be {port.dtype} {port.shape}, found {made.shape}: export the bundle again",
            port=port.name,
        )
    return made


def _numbers(process: EngineProcess, state: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of state tensors; RoundDeclined for state of a process that ended."""
    if any(value.process is not process for value in state.values()):
        raise RoundDeclined(CRASHED, "the engine's process ended, and with it what it had computed")
    return {name: value.number for name, value in state.items()}


def open_sandboxed(
    name: str, threads: int, most_threads: int, *, pages: Path, memory_bytes: int, limits: Limits
) -> SandboxedEngine:
    """Return the engine ``name``; ConfigError as of :func:`edgefl_device.engine.open_engine`.

    ``pages`` is the one folder that its process writes in, ``memory_bytes`` what the device offers to training.
    """
    if name not in ENGINES or not 1 <= threads <= MOST_THREADS:
        raise ConfigError(
            f"an engine is one of {', '.join(ENGINES)} with 1 to {MOST_THREADS} threads, found {name!r} with {threads}"
        )
    return SandboxedEngine(
        SandboxSettings(
            engine=name,
            threads=threads,
            most_threads=most_threads,
            pages=pages,
            step_s=limits.max_step_s,
            memory_bytes=memory_bytes,
            file_bytes=limits.store_bytes,
            readable=_read_by(name),
        )
    )


def _read_by(name: str) -> tuple[str, ...]:
    """Return the files that the engine reads besides its package. Builds them first: a confined process starts no
    compiler."""
    if name != "executorch":
        return ()
    from edgefl_device.engine.executorch.build import binding, find_wheel

    return (str(binding(find_wheel(), lambda _: None).parent),)
