"""Origin of each node in a bundle's graphs: content of the blob ``Manifest.sources``, which is fetched only for profiles.

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


class OpOriginRow(msgspec.Struct, frozen=True, array_like=True):
    """Encoded form of a :class:`OpOrigin`: ``phase`` is an index in :data:`PHASES`, ``module`` an index in
    ``OriginTable.modules``.
    """

    name: str
    op: str
    phase: int
    module: int
    macs: int
    nbytes: int


class OriginTable(msgspec.Struct, frozen=True, kw_only=True):
    """Encoded form of the nodes of all graphs.

    Attributes:
        modules: Module paths that the nodes refer to.
        graphs: Nodes of each graph, by its name.
    """

    modules: tuple[str, ...]
    graphs: dict[str, tuple[OpOriginRow, ...]]

    def nodes(self, graph: str) -> dict[str, OpOrigin]:
        """Return the nodes of a graph by name, in the order of the artifact. Empty for an unknown graph."""
        return {
            row.name: OpOrigin(row.op, PHASES[row.phase], self.modules[row.module], row.macs, row.nbytes)
            for row in self.graphs.get(graph, ())
        }


@dataclass(frozen=True)
class OpOrigin:
    """Origin and cost of one node of a graph.

    Attributes:
        op: Type of the op.
        phase: Stage of the training step.
        module: Path of the module whose weights the node uses, "" if none.
        macs: Multiply-accumulates.
        nbytes: Bytes that the node reads and writes, to estimate its time if the engine does not report it.
    """

    op: str
    phase: Phase
    module: str
    macs: int
    nbytes: int


def make_sources(graphs: Mapping[str, Mapping[str, OpOrigin]]) -> OriginTable:
    """Return the encoded form of nodes.

    Args:
        graphs: Nodes by name, of each graph by its name.
    """
    modules = sorted({node.module for nodes in graphs.values() for node in nodes.values()})
    number = {module: index for index, module in enumerate(modules)}
    return OriginTable(
        modules=tuple(modules),
        graphs={
            graph: tuple(
                OpOriginRow(name, n.op, PHASES.index(n.phase), number[n.module], n.macs, n.nbytes)
                for name, n in nodes.items()
            )
            for graph, nodes in graphs.items()
        },
    )


def encode(sources: OriginTable) -> bytes:
    """Return the msgpack bytes of ``sources``, the origins of all graph nodes. Equal sources give equal bytes."""
    return msgspec.msgpack.encode(sources, order="deterministic")


def decode(data: bytes) -> OriginTable:
    """Return the origins of all graph nodes that :func:`encode` encoded as ``data``.

    Raises:
        BundleError: The bytes are malformed, or refer to phases or modules that do not exist.
    """
    try:
        sources = msgspec.msgpack.decode(data, type=OriginTable)
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
