"""The bundle of :mod:`tests.device_runtime.tiny` as ExecuTorch programs: by its exporter, and by ours, which delegates.

The exporters are imported where they are used: they take seconds, also where no test of theirs is wanted. An algorithm is
written once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import Graph, Port
from tests.device_runtime import tiny

Body = Callable[..., tuple[Tensor, ...]]


class _Module(torch.nn.Module):
    def __init__(self, function: Body) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._function(*tensors)


def pte(function: Body, inputs: Sequence[Port], *, planned: bool = False) -> bytes:
    """``function`` of tensors as ExecuTorch's exporter writes it; ``planned``: inputs and outputs in the arena too."""
    from executorch.exir import ExecutorchBackendConfig, to_edge
    from executorch.exir.passes import MemoryPlanningPass

    example = tuple(torch.zeros(port.shape, dtype=getattr(torch, port.dtype)) for port in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        edge = to_edge(torch.export.export(_Module(function), example))
        memory = MemoryPlanningPass(alloc_graph_input=planned, alloc_graph_output=planned)
        return bytes(edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=memory)).buffer)


def our_pte(function: Body, inputs: Sequence[Port]) -> bytes:
    """The same as our exporter writes it, delegated to XNNPACK where that pays."""
    from edgefl_export.executorch.target import ExecuTorchTarget

    def named(tensors: Tensors) -> Tensors:
        results = function(*(tensors[port.name] for port in inputs))
        return {f"record.{number}": result for number, result in enumerate(results)}

    target = ExecuTorchTarget()
    specs = {port.name: TensorSpec(port.shape, getattr(torch, port.dtype)) for port in inputs}
    return target.emit(target.capture(Function("f", named, specs))).model


def graph_of(name: str, data: bytes, inputs: Sequence[Port], outputs: Sequence[Port]) -> Graph:
    ref = describe(data, tiny.CHUNK)
    return Graph(name=name, format="executorch", blob=ref, inputs=tuple(inputs), outputs=tuple(outputs))


def forward(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return (torch.relu(x @ weight),)


def start(weight: Tensor, carry: Tensor) -> tuple[Tensor, ...]:
    return weight.clone(), carry.clone(), torch.zeros_like(carry).sum()


def step(
    w: Tensor, v: Tensor, count: Tensor, x: Tensor, y: Tensor, noise: Tensor, lr: Tensor
) -> tuple[Tensor, ...]:
    error = x @ w - y.to(torch.float32).unsqueeze(1)
    moved = v * 0.5 + x.t() @ error / tiny.BATCH + noise * 0.01
    return w - moved * lr, moved, count + 1, (error * error).mean()


def finish(w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return w.clone(), v.clone()


@functools.cache
def _written(kind: str, delegated: bool) -> bytes:
    by_kind = {
        "forward": (forward, tiny.forward("stem")),
        "start": (start, tiny.start()),
        "train": (step, tiny.train()),
        "finish": (finish, tiny.finish()),
    }
    function, (graph, _) = by_kind[kind]
    return our_pte(function, graph.inputs) if delegated else pte(function, graph.inputs)


def train(*, delegated: bool = False) -> tuple[Graph, bytes]:
    """The training step and its bytes."""
    listed, data = tiny.train()[0], _written("train", delegated)
    return graph_of("train", data, listed.inputs, listed.outputs), data


def make_bundle(prefix: Sequence[str] = ("stem", "mid"), *, delegated: bool = False) -> BundleArchive:
    """The tiny bundle with the same ports, its graphs as algorithms."""
    listed = tiny.make_bundle(prefix).manifest
    made = {graph.name: _written(graph.name.partition(".")[0], delegated) for graph in listed.graphs}
    graphs = tuple(
        graph_of(graph.name, made[graph.name], graph.inputs, graph.outputs) for graph in listed.graphs
    )
    manifest = msgspec.structs.replace(listed, graphs=graphs)
    return BundleArchive(manifest, {graph.blob.sha256: made[graph.name] for graph in graphs})
