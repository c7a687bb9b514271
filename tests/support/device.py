"""Training graph of a bundle, driven in its engine on given batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

import edgefl
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.tensors import Arrays
from edgefl_device.engine import open_engine
from tests.support.case import Batch


class Device:
    """The training of a bundle in its engine, driven step by step without shuffling."""

    def __init__(self, bundle: edgefl.Bundle, target: str) -> None:
        assert bundle.made_of is not None
        self.spec = bundle.made_of[0].submodel.spec
        self.names: dict[str, str] = dict(self.spec.global_names)
        self.noise: list[Arrays] = []
        self._bundle = bundle
        self._engine = open_engine(target)
        self.before: Arrays = dict(bundle.initial_weights())
        self.after: Arrays = {}

    def train(self, feeds: list[tuple[Batch, Tensor]], lr: float) -> None:
        """Run the graphs ``start``, then one training step for each batch, then ``finish``."""
        manifest = self._bundle.manifest
        generator = np.random.default_rng(5)
        start = manifest.graph(manifest.start)
        state = self._load(start).run(self._weights(start) | _scalars(start, lr), {}).state
        (phase,) = manifest.phases
        graph = manifest.graph(phase.graph)
        loaded = self._load(graph)
        for inputs, y in feeds:
            noise = {
                port.name: generator.random(port.shape, dtype=np.float32).astype(port.dtype)
                for port in graph.inputs_of("noise")
            }
            if noise:
                self.noise.append({name.removeprefix("noise."): each for name, each in noise.items()})
            fed = noise | _scalars(graph, lr) | _batch(graph, inputs, y)
            state = {**state, **loaded.run(fed, state).state}
        arrays = self._engine.read_state(state)
        self.after = {
            name.removeprefix("state.weights."): np.array(each)
            for name, each in arrays.items()
            if name.startswith("state.weights.")
        }
        for name, each in self.before.items():  # a weight that no step changes may stay outside of the state
            self.after.setdefault(name, each)

    def _load(self, graph: Graph) -> Any:
        return self._engine.load(graph, self._bundle.contents.blobs[graph.blob.sha256])

    def _weights(self, graph: Graph) -> Arrays:
        return {port.name: self.before[port.label] for port in graph.inputs_of("weights")}


def _scalars(graph: Graph, lr: float) -> Arrays:
    return {
        port.name: np.full(port.shape, {"lr": lr}[port.label], port.dtype)
        for port in graph.inputs_of("hyper")
    }


def _batch(graph: Graph, inputs: Batch, y: Tensor) -> Arrays:
    fed: Arrays = {}
    for port in graph.inputs_of("batch"):
        part = port.label.partition(".")[2]
        rows = y if part == "y" else inputs.get(part, next(iter(inputs.values())))
        fed[port.name] = np.ascontiguousarray(rows.numpy().astype(port.dtype)).reshape(port.shape)
    return fed
