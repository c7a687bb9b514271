"""Artifacts: the bytes that a target emits for one function, and their cost on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgefl.contract.tensors import TensorSpec, role_of
from edgefl.wire.bundle.graphs import is_joined, join, split
from edgefl.wire.bundle.sources import OpOrigin

REWRITTEN = ".next"
"""Suffix of an ONNX output whose port is an input as well: ONNX gives each value of a graph a name of its own."""


@dataclass(frozen=True)
class SegmentPorts:
    """Inputs and outputs of one segment: one of several graphs that run one after another and compute a function together.

    ``in_place`` has the names of the state ports whose new value the segment writes into the memory of the old one.
    """

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    in_place: tuple[str, ...]


@dataclass(frozen=True)
class Artifact:
    """Exported graph of a function.

    Attributes:
        model: the bytes that a device loads.
        planned_bytes: memory over the idle process that one call needs; 0 if it is not known.
        in_place: state ports whose new value may be written into the memory of the old one.
        nodes: the nodes of the graph by name, with the source line of each.
        segments: ports of the segments whose artifacts ``model`` joins; empty for a graph in one piece.
        planned_outputs: outputs lie in memory that ``model`` planned, not in the caller's.
        least_runtime: first release of the runtime that loads ``model``; empty if it is not known.
        arena_bytes: the part of ``planned_bytes`` in the runtime's arena; 0 if it is not known.
        memory_budget: the budget in bytes that the form was chosen for; 0 for none.
    """

    model: bytes
    planned_bytes: int = 0
    in_place: tuple[str, ...] = ()
    nodes: Mapping[str, OpOrigin] = field(default_factory=dict)
    segments: tuple[SegmentPorts, ...] = ()
    planned_outputs: bool = False
    least_runtime: str = ""
    arena_bytes: int = 0
    memory_budget: int = 0


def is_page(name: str) -> bool:
    """Return True if the port ``name`` has the role ``page``: it passes a value from one segment of a graph to a later
    one.
    """
    return role_of(name) == "page"


def artifacts_in(model: bytes) -> list[bytes]:
    """Return the artifacts of the segments (graphs that run one after another) in order, or a list of ``model`` alone
    if it joins none.
    """
    return split(model) if is_joined(model) else [model]


def join_segments(
    parts: Sequence[tuple[Mapping[str, TensorSpec], Mapping[str, TensorSpec], Artifact]],
    planned_bytes: int,
    nodes: Mapping[str, OpOrigin],
) -> Artifact:
    """Join the artifacts of segments (graphs that run one after another) into one artifact.

    A state that a later segment reads is not written in place by an earlier one.

    Args:
        parts: (inputs, outputs, artifact) of each segment, in the order of execution; inputs and outputs by port name.
        planned_bytes: memory over the idle process that a call of all segments needs.
        nodes: the nodes of the whole graph by name.
    """
    segments = []
    for place, (inputs, outputs, artifact) in enumerate(parts):
        later = {name for others, _, _ in parts[place + 1 :] for name in others}
        free = tuple(name for name in artifact.in_place if name not in later)
        segments.append(SegmentPorts(inputs, outputs, free))
    return Artifact(
        model=join([artifact.model for _, _, artifact in parts]),
        planned_bytes=planned_bytes,
        in_place=tuple(name for segment in segments for name in segment.in_place),
        nodes=nodes,
        segments=tuple(segments),
        least_runtime=parts[0][2].least_runtime,
    )
