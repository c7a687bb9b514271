"""How many bytes of tensors a captured graph holds while each of its nodes runs, as a runtime executes it in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from exporters.ordering import AFTER

_aten = torch.ops.aten

# Same memory, another shape.
_VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        AFTER,
    }
)

_SLICE = _aten.slice.Tensor


@dataclass(frozen=True)
class Timeline:
    """Nodes in execution order, and for each the node that owns its memory and the positions that read this memory.

    ``live[i]`` is the number of bytes held while node ``i`` runs: graph inputs always, outputs until the end. Of an op
    with several results, each belongs to the node that takes it out, and ends by itself.
    """

    nodes: tuple[fx.Node, ...]
    position: dict[fx.Node, int]
    owner: dict[fx.Node, fx.Node]
    reads: dict[fx.Node, list[int]]
    live: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max(self.live)


def timeline(module: fx.GraphModule) -> Timeline:
    nodes = tuple(module.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    owner: dict[fx.Node, fx.Node] = {}
    reads: dict[fx.Node, list[int]] = {}
    for index, node in enumerate(nodes):
        owner[node] = owner[node.args[0]] if _shares(node) else node  # type: ignore[index]
        reads[node] = []
        for value in node.all_input_nodes:
            reads[owner[value]].append(index)
    return Timeline(nodes, position, owner, reads, _live(nodes, owner, reads))


def _shares(node: fx.Node) -> bool:
    """Whether ``node`` takes no memory of its own. The export merges slices of slices to the last one."""
    if node.op != "call_function":
        return False
    merged = node.target is _SLICE and [user.target for user in node.users] == [_SLICE]
    return merged or node.target in _VIEWS


def has_many(node: fx.Node) -> bool:
    """Whether the op of ``node`` has several results."""
    return isinstance(node.meta.get("val"), tuple | list)


def size(node: fx.Node) -> int:
    """Bytes of the tensors that ``node`` makes."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, tuple | list) else [value]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _live(
    nodes: Sequence[fx.Node], owner: dict[fx.Node, fx.Node], reads: dict[fx.Node, list[int]]
) -> tuple[int, ...]:
    ends: dict[int, int] = {}
    held = sum(size(node) for node in nodes if node.op in ("placeholder", "get_attr"))
    live = []
    for index, node in enumerate(nodes):
        if node.op == "call_function" and owner[node] is node:
            new = size(node)
            dying = [v for v in {owner[a] for a in node.all_input_nodes} if _dies(v, index, reads)]
            in_place = is_pointwise(node) and any(size(value) == new for value in dying)
            live.append(held + (0 if in_place else new) + workspace(node))
            if not has_many(node):
                held += new
                last = reads[node][-1] if reads[node] else index
                ends[last] = ends.get(last, 0) + new
        else:
            live.append(held)
        held -= ends.pop(index, 0)
    return tuple(live)


def workspace(node: fx.Node) -> int:
    """What an op needs while it runs: onnxruntime's Where fills a tensor for each choice, then merges them."""
    return 2 * size(node) if node.target is _aten.where.self else 0


def _dies(value: fx.Node, index: int, reads: dict[fx.Node, list[int]]) -> bool:
    return value.op == "call_function" and reads[value][-1] == index


def is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
