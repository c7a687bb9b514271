"""Manifest of a bundle: names, phases, graphs and their ports, from a request and its compiled graphs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import TensorSpec, prefixed, role_of
from edgefl.errors import ExportError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.graphs import Segment
from edgefl.wire.bundle.manifest import (
    HELD_OUT,
    PLANNED,
    SAMPLE,
    SEGMENTED,
    Bucket,
    DataSpec,
    FrozenChunk,
    Graph,
    Input,
    Manifest,
    PhaseSpec,
    Port,
)
from edgefl.wire.bundle.readers import SoundSpec, TextSpec
from edgefl.wire.mqtt.messages import VERSION
from edgefl_export.artifact import Artifact
from edgefl_export.compiler.request import FEATURES, CompileRequest


def build_manifest(
    request: CompileRequest, graphs: Sequence[Graph], sources: BlobRef, tokenizer: BlobRef | None = None
) -> Manifest:
    """Return the manifest (table of contents) of a bundle. :func:`check_wiring` checks that its graphs fit together.

    Args:
        request: the request that was compiled.
        graphs: entries of its functions, in the order of ``request.functions``.
        sources: reference to the sources blob, with module, phase and op of each node.
        tokenizer: reference to the tokenizer, for data with a text reader.

    Raises:
        ExportError: if the steps read batches of several sizes from one stream, or no batches (:func:`batch_size`).
    """
    algorithm = request.algorithm
    return Manifest(
        v=HELD_OUT if request.split is not None else _version(graphs),
        model=request.model,
        program=algorithm.name,
        tier=request.tier,
        exchange=request.exchange,
        parameters=trained_entries(algorithm),
        data=_complete_reader(request.data, {graph.name for graph in graphs}, tokenizer),
        batch=batch_size(algorithm),
        prefix=tuple(
            FrozenChunk(units=chunk.units, graph=f"forward.{number}")
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
        carry_any_tier=algorithm.carry_rule.any_tier or msgspec.UNSET,
        sources=sources,
        split=msgspec.UNSET if request.split is None else request.split,
    )


def _complete_reader(data: DataSpec, names: set[str], tokenizer: BlobRef | None) -> DataSpec:
    """Return ``data`` with its reader completed by the name of the features graph or the reference to the tokenizer."""
    reader = data.reader
    if isinstance(reader, SoundSpec) and FEATURES in names:
        return msgspec.structs.replace(data, reader=msgspec.structs.replace(reader, features=FEATURES))
    if isinstance(reader, TextSpec) and tokenizer is not None:
        return msgspec.structs.replace(data, reader=msgspec.structs.replace(reader, tokenizer=tokenizer))
    return data


def _version(graphs: Sequence[Graph]) -> int:
    """Return the manifest's version: the lowest whose devices can run all ``graphs``."""
    if any(graph.planned_outputs for graph in graphs):
        return PLANNED
    return SEGMENTED if any(graph.segments for graph in graphs) else VERSION


def ports(specs: Mapping[str, TensorSpec], masks: Mapping[str, int] | None = None) -> tuple[Port, ...]:
    """Return the manifest's ports for named tensors, in order.

    Args:
        specs: shape and dtype by name of the port.
        masks: number of bits by label of the update's tensors that are packed bits, such as binary masks.
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
    """Return the segments of an artifact (graphs that run one after another) as entries of a manifest; empty for a
    graph in one piece.
    """
    return tuple(
        Segment(inputs=ports(segment.inputs), outputs=ports(segment.outputs), in_place=segment.in_place)
        for segment in artifact.segments
    )


def batch_size(algorithm: Algorithm) -> int:
    """Return the number of rows of a training batch: the size of ports ``batch.0.*`` in the steps that draw batches.

    If no step draws batches, it is their size in the steps that pass over the data.

    Raises:
        ExportError: if no step reads ``batch.0``, if steps draw batches of several sizes from the same stream, or if
            the ports of one pass differ in size. Different streams may differ in size.
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
    """Return the number of rows of the batches that ``functions`` read, by stream: ``"0"`` for ports ``batch.0.*``.

    Raises:
        ExportError: if ports of a stream differ in size.
    """
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
    """Return the number of entries of the weights that the device trains, running statistics included.

    These are the ``state.weights.*`` ports that ``finish`` reads, or that the steps read if ``finish`` reads none.
    """
    finish, steps = algorithm.finish.inputs, [phase.function.inputs for phase in algorithm.phases]
    for ports in (finish, {name: spec for each in steps for name, spec in each.items()}):
        weights = [spec for name, spec in ports.items() if name.startswith("state.weights.")]
        if weights:
            return sum(math.prod(spec.shape) for spec in weights)
    return 0


# Check that the graphs of a manifest fit together: each tensor that one reads, an earlier one or the device provides.

_ALWAYS_FED = ("hyper", "data", "noise")
_SAMPLES = ("x", "y")


@dataclass(frozen=True)
class _RunStage:
    """Stage of a device's round in which it runs a graph.

    Attributes:
        what: name of the stage in error messages.
        roles: roles of the ports that the device feeds in this stage.
        remedy: advice of the error message for a port that the device does not feed.
        parts: parts of a batch that the device feeds, such as ``x``.
        first_only: the device feeds only the first stream of batches.
    """

    what: str
    roles: tuple[str, ...]
    remedy: str
    parts: tuple[str, ...] = ()
    first_only: bool = False

    def feeds(self, port: Port, others: Collection[str] = ()) -> bool:
        """Return True if a device feeds ``port`` in this stage. ``others`` has the names of a sample's inputs besides x."""
        if port.role != "batch":
            return port.role in self.roles
        stream, _, part = port.label.partition(".")
        known = part in self.parts or (bool(self.parts) and part in (SAMPLE, *others))
        return "batch" in self.roles and known and (stream == "0" or not self.first_only)


_KEEP_STATE = "return it from start as state.*, which steps read"
_START = _RunStage("start", ("weights", "carry", *_ALWAYS_FED), "read it in a step")
_STEP = _RunStage("a step", ("state", "batch", *_ALWAYS_FED), _KEEP_STATE, _SAMPLES)
_PASS = _RunStage("a step over the data", ("state", "batch", *_ALWAYS_FED), _KEEP_STATE, (*_SAMPLES, "mask"))
_FINISH = _RunStage(
    "finish", ("weights", "carry", "state", *_ALWAYS_FED), "return what it needs from a step as state.*"
)
_EVALUATE = _RunStage(
    "evaluate",
    ("weights", "batch"),
    "evaluate by weights and batch.0 alone",
    (*_SAMPLES, "mask"),
    first_only=True,
)
_PERSONALIZE = _RunStage(
    "personalize",
    ("weights", "batch", *_ALWAYS_FED),
    "make the step from weights and batch.0 alone",
    _SAMPLES,
    first_only=True,
)


def check_wiring(manifest: Manifest) -> None:
    """Check that the graphs of a manifest fit together.

    Raises:
        ExportError: if a graph reads a tensor that neither the device nor an earlier graph provides in this type and
            shape; the message names the function and the port.
    """
    for place, graph in _graphs_by_stage(manifest):
        _check_fed(place, graph, [each.name for each in manifest.data.others])
        _check_in_place(graph)
    steps = [manifest.graph(phase.graph) for phase in manifest.phases]
    _check_state([manifest.graph(manifest.start), *steps, manifest.graph(manifest.finish)])
    _check_hyper(manifest)
    _check_record([manifest.graph(chunk.graph) for chunk in manifest.prefix], steps)
    for phase in manifest.phases:
        for bucket in phase.shorter:
            _check_shorter(manifest.graph(phase.graph), manifest.graph(bucket.graph))
    for graph in {manifest.graph(name).name: manifest.graph(name) for name in _whole(manifest)}.values():
        _check_others(graph, manifest.data)
    for phase in manifest.phases:
        if phase.over_data:
            _check_pass(manifest.graph(phase.graph), manifest.data)
    if manifest.personalize:
        _check_personalize(manifest.graph(manifest.personalize))


def _graphs_by_stage(manifest: Manifest) -> Iterator[tuple[_RunStage, Graph]]:
    """Yield (stage, graph) for every graph but those of frozen chunks, which read a single port."""
    yield _START, manifest.graph(manifest.start)
    for phase in manifest.phases:
        for name in (phase.graph, *(bucket.graph for bucket in phase.shorter)):
            yield _PASS if phase.over_data else _STEP, manifest.graph(name)
    yield _FINISH, manifest.graph(manifest.finish)
    yield _EVALUATE, manifest.graph(manifest.evaluate)
    if manifest.personalize:
        yield _PERSONALIZE, manifest.graph(manifest.personalize)


def _check_fed(place: _RunStage, graph: Graph, others: Collection[str]) -> None:
    for port in graph.inputs:
        if not place.feeds(port, others):
            raise ExportError(
                f"function {graph.name!r} reads {port.name!r}, which no device feeds to {place.what}: "
                f"{_list_ports(place, others)}; {place.remedy}",
                function=graph.name,
                port=port.name,
                stage=place.what,
            )


def _check_in_place(graph: Graph) -> None:
    """Raise ExportError if state that is written into the memory of an input differs from that input in type or shape."""
    read = {port.name: port for port in graph.inputs_of("state")}
    left = {port.name: port for port in graph.outputs_of("state")}
    for name in graph.in_place:
        if name not in read or read[name] != left.get(name):
            raise ExportError(
                f"function {graph.name!r} is to write {name!r} in place, and reads {_shown(read.get(name))} and leaves "
                f"{_shown(left.get(name))} there; the exporter of format {graph.format!r} may name only state that stays "
                "as it is in type and shape",
                function=graph.name,
                port=name,
                format=graph.format,
            )


def _whole(manifest: Manifest) -> list[str]:
    """Return the names of all graphs except the training steps for shorter samples (:attr:`PhaseSpec.shorter`)."""
    shorter = {bucket.graph for phase in manifest.phases for bucket in phase.shorter}
    return [graph.name for graph in manifest.graphs if graph.name not in shorter]


def _check_shorter(whole: Graph, shorter: Graph) -> None:
    """Raise ExportError unless a step for shorter samples has the state ports and the rows of the step for full length."""
    states = [(each.inputs_of("state"), each.outputs_of("state")) for each in (whole, shorter)]
    rows = [[(port.name, port.shape[:1]) for port in each.inputs_of("batch")] for each in (whole, shorter)]
    if states[0] != states[1] or rows[0] != rows[1]:
        raise ExportError(
            f"function {shorter.name!r}, which {whole.name!r} is for shorter samples, reads or leaves another state or "
            "other rows: its weights may not depend on the length",
            function=shorter.name,
        )


def _check_others(graph: Graph, data: DataSpec) -> None:
    """Raise ExportError unless the batch ports of ``graph`` have the shape and dtype that the manifest gives for
    samples.
    """
    listed: dict[str, Input | DataSpec] = {SAMPLE: data, **{each.name: each for each in data.others}}
    for port in graph.inputs_of("batch"):
        part = port.label.partition(".")[2]
        if part in listed and (port.dtype, port.shape[1:]) != (listed[part].dtype, listed[part].shape):
            raise ExportError(
                f"function {graph.name!r} reads {port.name!r} as {_shown(port)}, samples have {part} as {listed[part].dtype}"
                f"{list(listed[part].shape)}; describe the data as the model reads them",
                function=graph.name,
                port=port.name,
                found=list(port.shape),
                expected=list(listed[part].shape),
            )


def _list_ports(place: _RunStage, others: Collection[str]) -> str:
    stream = "batch.0" if place.first_only else "batch.<k>"
    batches = [f"{stream}.{part}" for part in (*place.parts, *(others if place.parts else ()))]
    return f"it may read {_and([f'{role}.*' for role in place.roles if role != 'batch'] + batches)}"


def _and(words: Collection[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _check_state(graphs: list[Graph]) -> None:
    state: dict[str, Port] = {}
    for graph in graphs:
        for port in graph.inputs_of("state"):
            if state.get(port.name) != port:
                left = _shown(state.get(port.name))
                raise ExportError(
                    f"function {graph.name!r} reads {port.name!r} as {_shown(port)}, the functions before it leave "
                    f"{left}; return it from them",
                    function=graph.name,
                    port=port.name,
                )
        state |= {port.name: port for port in graph.outputs_of("state")}


def _check_hyper(manifest: Manifest) -> None:
    read = {port.label for graph in manifest.graphs for port in graph.inputs_of("hyper")}
    if missing := sorted(read - set(manifest.hyper)):
        raise ExportError(
            f"algorithm {manifest.program!r} reads {missing} but gives no default; list them in Algorithm.hyper",
            algorithm=manifest.program,
            hyper=missing,
        )


def _check_record(chunks: list[Graph], steps: list[Graph]) -> None:
    """Raise ExportError unless each chunk of frozen units returns rows of the shape that the next chunk, or the first
    step, reads.
    """
    for writer, reader in pairwise([*chunks, *steps[:1]] if chunks else []):
        left = next(iter(writer.outputs_of("record")), None)
        read = next((port for port in reader.inputs_of("batch") if port.label == "0.x"), None)
        if left is None or (read and (left.dtype, left.shape[1:]) != (read.dtype, read.shape[1:])):
            raise ExportError(
                f"chunk {writer.name!r} records {_shown(left)}, {reader.name!r} reads {_shown(read)}; cut the model "
                "at the same place for both",
                writer=writer.name,
                reader=reader.name,
            )


def _check_pass(graph: Graph, data: DataSpec) -> None:
    """Raise ExportError unless a step over all the data has one batch and reads its mask, by which it ignores repeated
    rows.
    """
    labels = {port.label for port in graph.inputs_of("batch")}
    allowed = {"0.x", "0.y", "0.mask", f"0.{SAMPLE}", *(f"0.{each.name}" for each in data.others)}
    if "0.mask" not in labels or not labels <= allowed:
        raise ExportError(
            f"function {graph.name!r} passes over the data and reads {sorted(labels)} of its batch; it should read 0.x, "
            "0.y and 0.mask, by which it leaves out the rows that only fill up the last batch, and no other stream",
            function=graph.name,
            batch=sorted(labels),
        )


def _check_personalize(graph: Graph) -> None:
    """Raise ExportError unless the graph that personalizes the model returns only metrics and weights with the ports
    that it reads.
    """
    read = {port.name: port for port in graph.inputs_of("weights")}
    roles = {port.role for port in graph.outputs}
    if "weights" not in roles or roles - {"weights", "metric"}:
        raise ExportError(
            f"function {graph.name!r} returns {sorted(roles)}; one that adapts the model returns weights and may return "
            "metrics, nothing else",
            function=graph.name,
        )
    for port in graph.outputs_of("weights"):
        if read.get(port.name) != port:
            raise ExportError(
                f"function {graph.name!r} returns {port.name!r} as {_shown(port)} and reads "
                f"{_shown(read.get(port.name))}; read and return the same weights",
                function=graph.name,
                port=port.name,
            )


def _shown(port: Port | None) -> str:
    return "nothing of that name" if port is None else f"{port.dtype}{list(port.shape)}"
