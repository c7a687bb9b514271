"""The formats that parity tests go through: what a device would load, in the runtime that it is meant for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.formats import Outputs
from edgefl.wire.bundle.manifest import Graph
from edgefl_device.engine import open_engine
from edgefl_device.engine.base import Engine
from edgefl_export.compiler.compiler import target_of
from edgefl_export.compiler.manifest import ports
from edgefl_export.verify.graphs import Verification
from tests.pairs import FORMATS

NAMES = FORMATS


def checked(form: str, function: Function, seed: int) -> Verification:
    """``function`` exported and compared with torch in the format's own runtime."""
    return target_of(form).verify(function, written(form, function), seed)


def written(form: str, function: Function) -> bytes:
    return made(form, function).model


def engine_of(form: str, threads: int = 1) -> Engine:
    """The device's engine for the format."""
    return open_engine(form, threads)


@dataclass(frozen=True)
class Made:
    """An exported function as a device gets it."""

    graph: Graph
    model: bytes


def made(form: str, function: Function, outputs: Outputs = "caller") -> Made:
    chosen = target_of(form, outputs)
    captured = chosen.capture(function)
    artifact = chosen.emit(captured)
    graph = Graph(
        name=function.name,
        format=chosen.name,
        blob=describe(artifact.model, 1 << 20),
        inputs=ports(captured.inputs),
        outputs=ports(captured.outputs),
        in_place=artifact.in_place,
        planned_outputs=artifact.planned_outputs,
    )
    return Made(graph, artifact.model)


def runner_of(form: str, function: Function, threads: int = 1) -> Callable[[Tensors], dict[str, np.ndarray]]:
    """``function`` exported, in the device's own engine: tensors by name in, arrays by name out."""
    return runner(made(form, function), threads)


def runner(exported: Made, threads: int = 1) -> Callable[[Tensors], dict[str, np.ndarray]]:
    graph, engine = exported.graph, engine_of(exported.graph.format, threads)
    loaded = engine.load(graph, exported.model)

    def run(given: Tensors) -> dict[str, np.ndarray]:
        arrays = {port.name: given[port.name].detach().contiguous().numpy() for port in graph.inputs}
        state = engine.write_state({name: a for name, a in arrays.items() if name.startswith("state.")})
        found = loaded.run({name: a for name, a in arrays.items() if not name.startswith("state.")}, state)
        everything = {**engine.read_state(found.state), **found.arrays}
        return {port.name: np.array(everything[port.name]) for port in graph.outputs}

    return run
