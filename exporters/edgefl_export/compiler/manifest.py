"""Manifest of a bundle: names, phases, graphs and their ports, from a request and its compiled graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import TensorSpec, prefixed, role_of
from edgefl.errors import ExportError
from edgefl.wire.blobs import BlobRef
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
from edgefl.wire.mqtt.messages import VERSION
from edgefl_export.artifact import Artifact
from edgefl_export.compiler.request import FEATURES, CompileRequest


def build_manifest(
    request: CompileRequest,
    graphs: Sequence[Graph],
    sources: BlobRef,
    tokenizer: BlobRef | None = None,
) -> Manifest:
    """Return the manifest of a bundle.

    Args:
        request: the exchange that was compiled.
        graphs: the entries of its functions, in the order of ``request.functions``.
        sources: the blob with the source line of each node.
        tokenizer: the blob of the tokenizer, for data whose reader is of text.

    Raises:
        ExportError: if the steps draw batches of several sizes from one stream, or none.
    """
    algorithm = request.algorithm
    return Manifest(
        v=_version(graphs),
        model=request.model,
        program=algorithm.name,
        tier=request.tier,
        exchange=request.exchange,
        parameters=trained_entries(algorithm),
        data=_completed(request.data, {graph.name for graph in graphs}, tokenizer),
        batch=batch_size(algorithm),
        prefix=tuple(
            Chunk(units=chunk.units, graph=f"forward.{number}")
            for number, chunk in enumerate(request.prefix, 1)
        ),
        suffix=request.units,
        start=algorithm.start.name,
        phases=tuple(
            PhaseSpec(
                name=phase.name,
                graph=phase.function.name,
                steps=phase.steps,
                over_data=phase.over_data,
                shorter=tuple(
                    Bucket(length=length, graph=shorter.name) for length, shorter in phase.shorter.items()
                ),
            )
            for phase in algorithm.phases
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


def _completed(data: DataSpec, names: set[str], tokenizer: BlobRef | None) -> DataSpec:
    """Return ``data`` with the name of the graph that makes samples of sounds, or the blob of the tokenizer."""
    reader = data.reader
    if isinstance(reader, SoundReader) and FEATURES in names:
        return msgspec.structs.replace(data, reader=msgspec.structs.replace(reader, features=FEATURES))
    if isinstance(reader, TextReader) and tokenizer is not None:
        return msgspec.structs.replace(data, reader=msgspec.structs.replace(reader, tokenizer=tokenizer))
    return data


def _version(graphs: Sequence[Graph]) -> int:
    """Return the manifest's version: a later one if older devices could not run one of the graphs."""
    if any(graph.planned_outputs for graph in graphs):
        return PLANNED
    return SEGMENTED if any(graph.segments for graph in graphs) else VERSION


def ports(specs: Mapping[str, TensorSpec], masks: Mapping[str, int] | None = None) -> tuple[Port, ...]:
    """Return the ports of named tensors.

    Args:
        specs: shape and dtype by port.
        masks: number of bits by label, for those of an update's tensors that are packed bits.
    """
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
    """Return the segments of an artifact as entries of a manifest."""
    return tuple(
        Segment(inputs=ports(segment.inputs), outputs=ports(segment.outputs), in_place=segment.in_place)
        for segment in artifact.segments
    )


def batch_size(algorithm: Algorithm) -> int:
    """Return the rows of ``batch.0`` in the steps that draw batches, or else in those that pass over the data.

    Streams may differ in size. Steps that draw from the same stream may not, and neither may the ports of one pass.

    Raises:
        ExportError: if they do, or if no step reads ``batch.0``.
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
    """Return the rows of each stream by its number in port names; ExportError if its ports differ."""
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
    """Return the number of entries that the device trains, moving statistics included.

    These are the weights that ``finish`` reads, or the steps if it reads none.
    """
    finish, steps = algorithm.finish.inputs, [phase.function.inputs for phase in algorithm.phases]
    for ports in (finish, {name: spec for each in steps for name, spec in each.items()}):
        weights = [spec for name, spec in ports.items() if name.startswith("state.weights.")]
        if weights:
            return sum(math.prod(spec.shape) for spec in weights)
    return 0
