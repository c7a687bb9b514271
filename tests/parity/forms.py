"""The formats that parity tests go through: what a device would load, in the runtime that it is meant for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from device_runtime.engine.base import Engine
from device_runtime.engine.select import open_engine
from edgefl.programs.contract import Function, Tensors
from edgefl.wire.blobs import describe
from edgefl.wire.manifest import Graph
from exporters.bundle import ports
from exporters.formats import Format, format_of
from exporters.verify import Report

NAMES = ("onnx", "executorch")
on_both = pytest.mark.parametrize("form", NAMES)


def checked(form: str, function: Function, seed: int) -> Report:
    """``function`` exported and compared with torch in the format's own runtime."""
    made = format_of(form)
    return made.verify(function, written(form, function), seed)


def written(form: str, function: Function) -> bytes:
    made: Format = format_of(form)
    return made.write(made.capture(function)).model


def engine_of(form: str, threads: int = 1) -> Engine:
    """The device's engine for the format."""
    return open_engine(form, threads)


def runner_of(form: str, function: Function, threads: int = 1) -> Callable[[Tensors], dict[str, np.ndarray]]:
    """``function`` exported, in the device's own engine: tensors by name in, arrays by name out."""
    made, engine = format_of(form), engine_of(form, threads)
    captured = made.capture(function)
    artifact = made.write(captured)
    graph = Graph(
        name=function.name,
        format=made.name,
        blob=describe(artifact.model, 1 << 20),
        inputs=ports(captured.inputs),
        outputs=ports(captured.outputs),
        in_place=artifact.in_place,
    )
    loaded = engine.load(graph, artifact.model)

    def run(given: Tensors) -> dict[str, np.ndarray]:
        arrays = {name: given[name].detach().contiguous().numpy() for name in captured.inputs}
        state = engine.write_state({name: a for name, a in arrays.items() if name.startswith("state.")})
        found = loaded.run({name: a for name, a in arrays.items() if not name.startswith("state.")}, state)
        everything = {**engine.read_state(found.state), **found.arrays}
        return {name: np.array(everything[name]) for name in captured.outputs}

    return run
