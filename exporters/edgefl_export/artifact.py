"""What a format makes of a captured function."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgefl.contract.tensors import TensorSpec, role_of
from edgefl.wire.bundle.graphs import is_joined, joined, split
from edgefl.wire.bundle.sources import Node


@dataclass(frozen=True)
class Part:
    """A segment: the ports of one of the artifacts that a function was cut into, and the state that it writes in place."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    in_place: tuple[str, ...]


@dataclass(frozen=True)
class Artifact:
    """``model`` is what a device loads.

    ``planned_bytes``: memory over the idle process that one call needs, known in advance (0: unknown).
    ``in_place``: state ports whose new value may be written into the memory of the old one.
    ``nodes``: what is in it, by name, and where that comes from.
    ``parts``: the segments whose artifacts ``model`` joins; empty where it is one artifact.
    ``planned_outputs``: outputs lie in memory that ``model`` planned, not in the caller's.
    ``least_runtime``: first release of the runtime that loads ``model``; empty if it is not known.
    ``arena_bytes``: the part of ``planned_bytes`` that the runtime's arena takes (0: unknown).
    """

    model: bytes
    planned_bytes: int = 0
    in_place: tuple[str, ...] = ()
    nodes: Mapping[str, Node] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    planned_outputs: bool = False
    least_runtime: str = ""
    arena_bytes: int = 0

    @property
    def paged_bytes(self) -> int:
        """What a run leaves on the disk for its later segments."""
        pages = {name: spec for part in self.parts for name, spec in part.outputs.items() if is_page(name)}
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in pages.values())


def is_page(name: str) -> bool:
    """Whether a port is between segments."""
    return role_of(name) == "page"


def artifacts_in(model: bytes) -> list[bytes]:
    """Those of the segments that ``model`` joins, or ``model`` alone."""
    return split(model) if is_joined(model) else [model]


def in_segments(
    parts: Sequence[tuple[Mapping[str, TensorSpec], Mapping[str, TensorSpec], Artifact]],
    planned_bytes: int,
    nodes: Mapping[str, Node],
) -> Artifact:
    """One artifact of several: the ports of each and what was made of it.

    State that a later segment reads is not written in place by an earlier one.
    """
    made = []
    for place, (inputs, outputs, artifact) in enumerate(parts):
        later = {name for others, _, _ in parts[place + 1 :] for name in others}
        free = tuple(name for name in artifact.in_place if name not in later)
        made.append(Part(inputs, outputs, free))
    return Artifact(
        model=joined([artifact.model for _, _, artifact in parts]),
        planned_bytes=planned_bytes,
        in_place=tuple(name for part in made for name in part.in_place),
        nodes=nodes,
        parts=tuple(made),
        least_runtime=parts[0][2].least_runtime,
    )
