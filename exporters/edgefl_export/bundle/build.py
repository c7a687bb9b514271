"""A tier's bundle: every function of its round exported, checked against torch, and listed in a manifest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import TensorSpec, prefixed, role_of
from edgefl.errors import ExportError
from edgefl.system.collecting import collecting_later
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.graphs import Segment
from edgefl.wire.bundle.manifest import (
    PLANNED,
    SEGMENTED,
    Bucket,
    Chunk,
    DataSpec,
    Graph,
    Manifest,
    PhaseSpec,
    Port,
)
from edgefl.wire.bundle.readers import SoundReader, TextReader
from edgefl.wire.bundle.sources import Node
from edgefl.wire.bundle.variants import folded
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import VERSION
from edgefl_export.artifact import Artifact
from edgefl_export.bundle.features import features_of
from edgefl_export.bundle.formats import Format, Onnx
from edgefl_export.bundle.wiring import check_wiring
from edgefl_export.capture.fingerprint import Joints
from edgefl_export.memory.recompute import Budget
from edgefl_export.sources.blob import packed_sources

VERIFY_SEED = 1


@dataclass(frozen=True)
class Prefix:
    """One frozen chunk: its units and the function that runs them forward."""

    units: tuple[str, ...]
    forward: Function


@dataclass(frozen=True)
class Label:
    """What people read on a bundle. ``exchange``: which one of a method of several, "" the main one."""

    model: str
    tier: str
    exchange: str = ""


def build_bundle(
    algorithm: Algorithm,
    prefix: Sequence[Prefix],
    suffix: tuple[str, ...],
    *,
    label: Label,
    data: DataSpec,
    chunk_bytes: int = Limits().chunk_bytes,
    memory_budget: Budget | None = None,
    tokenizer: bytes = b"",
    format: Format | None = None,
    progress: Callable[[str], None] = lambda _: None,
    joints: Joints | None = None,
) -> Bundle:
    """Export ``algorithm`` behind ``prefix`` for a device that trains the units ``suffix``, in ``format`` (default: ONNX).

    ``memory_budget`` bounds the steps: they recompute what it takes. ``tokenizer`` goes into the bundle, for data
    whose reader is of text. ``joints``: first graphs that were traced before. Every graph is run once in the runtime of its
    format and compared with torch before the bundle exists. Raises ExportError, also if the functions do not fit together (a
    step reads a state that nobody left). Equal functions give equal bytes, so tiers share graphs by their digest.
    """
    blobs: dict[str, bytes] = {}
    nodes: dict[str, Mapping[str, Node]] = {}
    written = format or Onnx()
    steps = {function.name for phase in algorithm.phases for function in phase.functions}

    def add(name: str, function: Function) -> Graph:
        progress(f"{label.model}, tier {label.tier}: graph {name} ({written.name})")
        with collecting_later():
            captured = written.capture(function, joints.take(function) if joints else None)
            if memory_budget is not None and name in steps:
                artifact, budget = written.write_within(captured, memory_budget)
            else:
                artifact, budget = written.write(captured), 0
        verified = written.verify(function, artifact.model, VERIFY_SEED, artifact.in_place, quick=True)
        ref = describe(artifact.model, chunk_bytes)
        blobs[ref.sha256] = artifact.model
        variants = []
        others = written.variants(captured, artifact, verified) if name in steps else {}
        for kind, other in others.items():
            variant, frame = folded(kind, other, chunk_bytes, base=artifact.model)
            variants.append(variant)
            blobs[variant.blob.sha256] = frame
        nodes[name] = artifact.nodes
        masks = algorithm.masks if name == algorithm.finish.name else {}
        return Graph(
            name=name,
            format=written.name,
            blob=ref,
            inputs=ports(captured.inputs),
            outputs=ports(captured.outputs, masks),
            memory_budget=budget,
            planned_bytes=artifact.planned_bytes,
            arena_bytes=artifact.arena_bytes,
            in_place=artifact.in_place,
            metrics=function.metrics,
            activations=function.activations,
            variants=tuple(variants),
            segments=segments_of(artifact),
            planned_outputs=artifact.planned_outputs,
            least_runtime=artifact.least_runtime,
        )

    chunks = [(f"forward.{number}", chunk) for number, chunk in enumerate(prefix, 1)]
    graphs = [add(name, chunk.forward) for name, chunk in chunks]
    graphs += [add(name, function) for name, function in _named(algorithm).items()]
    if (made := features_of(data)) and isinstance(data.reader, SoundReader):
        graphs.append(add(made.name, made))
        data = msgspec.structs.replace(data, reader=msgspec.structs.replace(data.reader, features=made.name))
    sources, listing = packed_sources(nodes, chunk_bytes)
    blobs[sources.sha256] = listing
    if tokenizer and isinstance(data.reader, TextReader):
        ref = describe(tokenizer, chunk_bytes)
        blobs[ref.sha256] = tokenizer
        data = msgspec.structs.replace(data, reader=msgspec.structs.replace(data.reader, tokenizer=ref))
    manifest = Manifest(
        v=_version(graphs),
        model=label.model,
        program=algorithm.name,
        tier=label.tier,
        exchange=label.exchange,
        parameters=trained_entries(algorithm),
        data=data,
        batch=batch_size(algorithm),
        prefix=tuple(Chunk(units=chunk.units, graph=name) for name, chunk in chunks),
        suffix=suffix,
        start=algorithm.start.name,
        phases=tuple(
            PhaseSpec(
                name=p.name,
                graph=p.function.name,
                steps=p.steps,
                over_data=p.over_data,
                shorter=tuple(Bucket(length=length, graph=each.name) for length, each in p.shorter.items()),
            )
            for p in algorithm.phases
        ),
        finish=algorithm.finish.name,
        evaluate=algorithm.evaluate.name,
        hyper=dict(algorithm.hyper),
        graphs=tuple(graphs),
        codec=algorithm.form.codec,
        codec_version=algorithm.form.version,
        personalize=algorithm.personalize.name if algorithm.personalize else "",
        draws=algorithm.draws,
        carry_exchanges=algorithm.carry_rule.exchanges,
        carry_needed=algorithm.carry_rule.needed,
        sources=sources,
    )
    check_wiring(manifest)
    return Bundle(manifest, blobs)


def _version(graphs: Sequence[Graph]) -> int:
    """Of their manifest: another one where a device could not run them that does not know what they ask for."""
    if any(graph.planned_outputs for graph in graphs):
        return PLANNED
    return SEGMENTED if any(graph.segments for graph in graphs) else VERSION


def _named(algorithm: Algorithm) -> dict[str, Function]:
    """The functions by name; phases may share one, but two may not share a name."""
    named: dict[str, Function] = {}
    for function in algorithm.functions:
        if named.setdefault(function.name, function) is not function:
            raise ExportError(
                f"algorithm {algorithm.name!r} has two functions named {function.name!r}; give each its own name",
                algorithm=algorithm.name,
                function=function.name,
            )
    return named


def ports(specs: Mapping[str, TensorSpec], masks: Mapping[str, int] | None = None) -> tuple[Port, ...]:
    """Named tensors as a manifest tells them; ``masks`` names the packed bits among an update's, with their number."""
    packed = prefixed("update", masks or {})
    return tuple(
        Port(
            name=name,
            role=role_of(name),  # type: ignore[arg-type]
            dtype=str(spec.dtype).removeprefix("torch."),
            shape=spec.shape,
            mask=packed.get(name, 0),
            ignored=spec.ignored,
        )
        for name, spec in specs.items()
    )


def segments_of(artifact: Artifact) -> tuple[Segment, ...]:
    """The segments of an artifact as a manifest tells them."""
    return tuple(
        Segment(inputs=ports(part.inputs), outputs=ports(part.outputs), in_place=part.in_place)
        for part in artifact.parts
    )


def batch_size(algorithm: Algorithm) -> int:
    """Rows of ``batch.0`` in the steps that draw batches, or else in those that pass over the data.

    Streams may differ in size; steps that draw from the same one may not, and neither may the ports of one pass.
    """
    draw_steps = [phase.function for phase in algorithm.phases if not phase.over_data]
    passing = [phase.function for phase in algorithm.phases if phase.over_data]
    sizes = [_stream_sizes(algorithm, functions) for functions in (draw_steps, *([each] for each in passing))]
    rows = next((each["0"] for each in sizes if "0" in each), 0)
    if not rows:
        raise ExportError(
            f"no step of algorithm {algorithm.name!r} reads batch.0, which every device draws; give one of them that port",
            algorithm=algorithm.name,
        )
    return rows


def _stream_sizes(algorithm: Algorithm, functions: Sequence[Function]) -> dict[str, int]:
    """Rows of each stream, by its number as ports have it; ExportError if its ports differ."""
    streams: dict[str, set[int]] = {}
    for function in functions:
        for name, spec in function.inputs.items():
            if role_of(name) == "batch":
                streams.setdefault(name.split(".")[1], set()).add(spec.shape[0] if spec.shape else 0)
    for stream, sizes in streams.items():
        if len(sizes) != 1:
            raise ExportError(
                f"the batches of stream {stream} of algorithm {algorithm.name!r} should have one size, found "
                f"{sorted(sizes)}; declare the same number of rows in all steps that read it",
                sizes=sizes,
            )
    return {stream: sizes.pop() for stream, sizes in streams.items()}


def trained_entries(algorithm: Algorithm) -> int:
    """Entries that the device trains, moving statistics included: those that ``finish`` reads, or the steps where it
    reads none."""
    finish, steps = algorithm.finish.inputs, [phase.function.inputs for phase in algorithm.phases]
    for ports in (finish, {name: spec for each in steps for name, spec in each.items()}):
        weights = [spec for name, spec in ports.items() if name.startswith("state.weights.")]
        if weights:
            return sum(math.prod(spec.shape) for spec in weights)
    return 0
