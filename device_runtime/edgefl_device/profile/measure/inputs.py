"""Random but valid inputs for graphs, made from a manifest's ports alone."""

from __future__ import annotations

import math

import numpy as np

from edgefl.wire.bundle.manifest import Graph, Manifest, Port
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data.samples import FittedData, LabelSpec

SCALAR = 0.01
"""Value of a scalar that the manifest does not name, such as the step size of a personalization."""


class RandomInputs:
    """Generator of random arrays for ports; the results depend only on the seed and the order of the calls.

    Weights are scaled by their fan-in and vectors lie around 1, so that values stay finite through deep models.
    """

    def __init__(self, manifest: Manifest, seed: int = 0) -> None:
        self._manifest = manifest
        self._random = np.random.default_rng(seed)

    def feeds(self, graph: Graph) -> Arrays:
        """Return arrays for all inputs of ``graph`` except state, by port name."""
        return {port.name: self.array(port) for port in graph.inputs if port.role != "state"}

    def array(self, port: Port) -> Array:
        """Return an array of the port's shape and dtype, with values that suit its role."""
        if port.role == "hyper":
            return np.full(port.shape, self._manifest.hyper.get(port.label, SCALAR), port.dtype)
        if port.role == "batch":
            return self._batch(port)
        if port.role == "weights":
            return self._weight(port)
        if port.role == "noise":
            return np.asarray(self._random.random(port.shape), port.dtype)
        return np.full(port.shape, int(port.role == "data"), port.dtype)

    def weights(self, manifest: Manifest) -> dict[str, Arrays]:
        """Return random weights of everything that the graphs read, as a round delivers them: unit -> global name ->
        array.
        """
        ports = {port.label: port for graph in manifest.graphs for port in graph.inputs_of("weights")}
        units = [*(unit for chunk in manifest.prefix for unit in chunk.units), *manifest.suffix]
        weights: dict[str, Arrays] = {unit: {} for unit in units}
        for label, port in ports.items():
            owners = [unit for unit in units if label.startswith(f"{unit}.")]
            weights[max(owners, key=len) if owners else manifest.suffix[0]][label] = self.array(port)
        return weights

    def samples(self, rows: int) -> FittedData:
        """Return random local data of ``rows`` rows that fit the manifest."""
        spec, label = self._manifest.data, LabelSpec.of(self._manifest)
        x = self._drawn((rows, *spec.shape), spec.dtype, 2)
        others = {
            each.name: self._drawn((rows, *each.shape), each.dtype, min(2, each.below or 2))
            for each in spec.others
        }
        y = self._drawn((rows, *label.shape), label.dtype, spec.classes)
        return FittedData(x, y, spec, others, label)

    def _batch(self, port: Port) -> Array:
        part = port.label.partition(".")[2]
        if part == "mask":
            return np.ones(port.shape, port.dtype)
        return self._drawn(port.shape, port.dtype, self._manifest.data.classes if part == "y" else 2)

    def _drawn(self, shape: tuple[int, ...], dtype: str, below: int) -> Array:
        if np.issubdtype(dtype, np.integer):
            return self._random.integers(0, max(1, below), shape).astype(dtype)
        return np.asarray(self._random.random(shape, dtype=np.float32), dtype)

    def _weight(self, port: Port) -> Array:
        if not np.issubdtype(port.dtype, np.floating):
            return np.full(port.shape, 255 if port.mask else 0, port.dtype)
        if len(port.shape) < 2:
            return np.asarray(self._random.uniform(0.5, 1.5, port.shape), port.dtype)
        scale = 1.0 / math.sqrt(max(1, math.prod(port.shape[1:])))
        return np.asarray(scale * self._random.standard_normal(port.shape, dtype=np.float32), port.dtype)
