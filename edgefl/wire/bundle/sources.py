"""Origin of each node of a bundle's graphs: the blob ``Manifest.sources``, fetched for profiles only.

::

    nodes = sources.decode(decompress(ref, data, limit)).nodes("train")
    nodes["MatMul_42"].module        # "layer1.0.conv1"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from edgefl.errors import BundleError
from edgefl.wire.mqtt.messages import MALFORMED

Phase = Literal["forward", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")


class NodeRecord(msgspec.Struct, frozen=True, array_like=True):
    """A node as it is stored: ``phase`` is an index of :data:`PHASES`, ``module`` one of the list of modules."""

    name: str
    op: str
    phase: int
    module: int
    macs: int
    nbytes: int


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of each graph by its name, and the module paths that they share."""

    modules: tuple[str, ...]
    graphs: dict[str, tuple[NodeRecord, ...]]

    def nodes(self, graph: str) -> dict[str, Node]:
        """Return the graph's nodes by name, in the order of the artifact. Empty for an unknown graph."""
        return {
            row.name: Node(row.op, PHASES[row.phase], self.modules[row.module], row.macs, row.nbytes)
            for row in self.graphs.get(graph, ())
        }


@dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        module: Path of the module whose weights it uses, "" if none.
        macs: Multiply-accumulates.
        nbytes: Bytes it reads and writes, to estimate its time if the engine does not report it.
    """

    op: str
    phase: Phase
    module: str
    macs: int
    nbytes: int


def sources_of(graphs: Mapping[str, Mapping[str, Node]]) -> Sources:
    """Return the sources of graphs of named nodes."""
    modules = sorted({node.module for nodes in graphs.values() for node in nodes.values()})
    number = {module: index for index, module in enumerate(modules)}
    return Sources(
        modules=tuple(modules),
        graphs={
            graph: tuple(
                NodeRecord(name, n.op, PHASES.index(n.phase), number[n.module], n.macs, n.nbytes)
                for name, n in nodes.items()
            )
            for graph, nodes in graphs.items()
        },
    )


def encode(sources: Sources) -> bytes:
    """Return deterministic bytes."""
    return msgspec.msgpack.encode(sources, order="deterministic")


def decode(data: bytes) -> Sources:
    """Return the sources in ``data``. Raises BundleError if they are malformed."""
    try:
        sources = msgspec.msgpack.decode(data, type=Sources)
    except MALFORMED as error:
        raise BundleError(
            f"the sources of a bundle are malformed: {error}; export the bundle again"
        ) from error
    rows = [row for rows in sources.graphs.values() for row in rows]
    if any(not (0 <= row.phase < len(PHASES) and 0 <= row.module < len(sources.modules)) for row in rows):
        raise BundleError(
            "the sources of a bundle name phases or modules that do not exist; export the bundle again"
        )
    return sources
