"""Graphs and their inputs in a folder, from which a process without torch runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.repetition import StepWorker, worker_of
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, prefixed, role_of
from edgefl.submodels.submodel import Submodel
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.formats import FormatName
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.limits import Limits
from edgefl.wire.regions import extract
from edgefl.wire.tensors import Arrays
from edgefl_export.artifact import Artifact
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.compiler.manifest import ports, segments_of
from edgefl_export.memory.usage import rewritable
from edgefl_export.onnx.model import to_onnx
from edgefl_export.onnx.target import OnnxTarget
from edgefl_export.target import Target

BATCHES = 2


def write_job(
    folder: Path, form: Target, function: Function, left: Tensors, hyper: Mapping[str, float]
) -> Artifact:
    """Export ``function`` and write its graph, its state and weights among ``left``, and batches; return the artifact.

    Raises ExportError if the function cannot be exported.
    """
    folder.mkdir(parents=True, exist_ok=True)
    captured = form.capture(function)
    artifact = form.emit(captured)
    write_graph(folder, captured, artifact, form.name)
    write_arrays(folder, captured, function, left, hyper)
    return artifact


def write_graph(
    folder: Path,
    captured: LoweredGraph,
    artifact: Artifact,
    format: FormatName,
    *,
    name: str = "graph",
    memory_budget: int = 0,
    masks: Mapping[str, int] | None = None,
) -> None:
    """Write the artifact and its entry of a manifest, with ``masks`` of :func:`edgefl_export.compiler.manifest.ports`."""
    graph = Graph(
        name=captured.name,
        format=format,
        blob=describe(artifact.model, Limits().chunk_bytes),
        inputs=ports(captured.inputs),
        outputs=ports(captured.outputs, masks),
        memory_budget=memory_budget,
        planned_bytes=artifact.planned_bytes,
        arena_bytes=artifact.arena_bytes,
        in_place=artifact.in_place,
        segments=segments_of(artifact),
        planned_outputs=artifact.planned_outputs,
    )
    (folder / f"{name}.msgpack").write_bytes(msgspec.msgpack.encode(graph))
    (folder / f"{name}.bin").write_bytes(artifact.model)


def write_arrays(
    folder: Path, captured: LoweredGraph, function: Function, left: Tensors, hyper: Mapping[str, float]
) -> None:
    """Write the state and the other inputs: several batches if the function trains, else one."""
    arrays = {name: left[name].numpy() for name in captured.inputs if name in left}
    state = {name: array for name, array in arrays.items() if role_of(name) == "state"}
    np.savez(folder / "state.npz", **state)  # type: ignore[arg-type]
    for seed in range(BATCHES if state else 1):
        read: Arrays = {name: array for name, array in arrays.items() if role_of(name) == "weights"}
        example = function.example(seed)
        read |= {name: example[name].numpy() for name in captured.inputs if role_of(name) == "batch"}
        read |= {f"hyper.{name}": np.asarray(value, np.float32) for name, value in hyper.items()}
        np.savez(folder / f"batch{seed}.npz", **read)  # type: ignore[arg-type]


Exported = tuple[LoweredGraph, bytes]
"""A captured function and its ONNX graph."""
_SEED = 0


def export(function: Function) -> Exported:
    """Return the captured ``function`` and its ONNX graph."""
    captured = OnnxTarget().capture(function)
    return captured, to_onnx(captured)


def write_function(
    folder: Path,
    name: str,
    function: Function,
    known: Tensors,
    exported: Exported | None = None,
    masks: Mapping[str, int] | None = None,
) -> int:
    """Write the graph of ``function`` and its inputs except noise, random where they are not ``known``.

    Returns:
        The bytes of the graph.
    """
    captured, model = exported or export(function)
    artifact = Artifact(model, in_place=rewritable(captured))
    write_graph(folder, captured, artifact, "onnx", name=name, masks=masks)
    inputs = _inputs(function, known)
    arrays = {port: inputs[port].numpy() for port in captured.inputs if role_of(port) != "noise"}
    np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    return len(model)


def with_state(algorithm: Algorithm, known: Tensors, phases: Sequence[Phase]) -> Tensors:
    """Return ``known`` with the scalars, and the state after the start and one step of each of ``phases``."""
    inputs = known | prefixed("hyper", {name: torch.tensor(value) for name, value in algorithm.hyper.items()})
    inputs |= algorithm.start(_inputs(algorithm.start, inputs))
    for phase in phases:
        outputs = phase.function(_inputs(phase.function, inputs))
        inputs |= {name: tensor.detach() for name, tensor in outputs.items() if role_of(name) == "state"}
    return inputs


def _inputs(function: Function, known: Tensors) -> Tensors:
    return {name: known.get(name, tensor) for name, tensor in function.example(_SEED).items()}


def payload(submodel: Submodel) -> Tensors:
    """Return the inputs of ``start`` in round 1: the tier's payload, or the units' tensors."""
    weights = {name: tensor.numpy() for name, tensor in submodel.spec.weights.items()}
    placement = submodel.place(weights, 1)
    arrays = placement.payload or extract(weights, placement.regions)
    return prefixed("weights", {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})


def worker(folder: Path, threads: int) -> StepWorker:
    """Return the process that runs the files of :func:`write_graph` and :func:`write_arrays`; enter it to start."""
    return worker_of("benchmarks.workers.step", folder, threads, threads=threads)
