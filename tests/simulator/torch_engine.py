"""A device's engine that runs the functions themselves in torch, in place of what was compiled of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from edgefl.config import Federation
from edgefl.contract.tensors import role_of
from edgefl.data.dataset import Dataset
from edgefl.simulator.functions import Functions, Recorded, SimulationPlan
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine.base import Engine, Outputs, State
from tests.support.arrays import as_tensors


@dataclass(frozen=True)
class _Loaded:
    graph: Graph
    recorded: Recorded

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        given = as_tensors(feeds)
        out = self.recorded(given | {port.name: state[port.name] for port in self.graph.inputs_of("state")})
        mine = {port.name: out[port.name] for port in self.graph.outputs}
        return Outputs(
            {name: tensor for name, tensor in mine.items() if role_of(name) == "state"},
            {name: tensor.numpy() for name, tensor in mine.items() if role_of(name) != "state"},
        )


@dataclass(frozen=True)
class TorchEngine:
    """Runs what a bundle in ONNX's format says, of one tier, by the functions of a simulation's plan."""

    functions: Functions
    name: str = "torch"
    version: str = str(torch.__version__)
    format: str = "onnx"
    thread_counts: tuple[int, ...] = (1,)

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> _Loaded:
        return _Loaded(graph, self.functions.record_function(graph.name, 1))

    def read_state(self, state: State) -> Arrays:
        return {name: tensor.numpy() for name, tensor in state.items()}

    def write_state(self, arrays: Mapping[str, Array]) -> State:
        return as_tensors(arrays)


def torch_engines(federation: Federation, dataset: Dataset) -> Mapping[str, Engine]:
    """One for each tier of a federation with a single exchange."""
    functions = SimulationPlan.of(federation, dataset, device="cpu").functions
    assert {index for _, index in functions} == {0}
    return {tier: TorchEngine(each) for (tier, _), each in functions.items()}
