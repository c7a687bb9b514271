"""Normal form of an exported graph: no nested regions, no dead operations. Also properties of its nodes."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from edgefl.errors import ModelError

_aten = torch.ops.aten
# Operations that fill a tensor of another tensor's size, with the value; None: the value is the last argument.
_FILLINGS = {
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
    _aten.full_like.default: None,
    _aten.new_full.default: None,
}


def normalize(module: fx.GraphModule) -> fx.Graph:
    """Normalize the graph of ``module``, the result of an export, in place and return it.

    Inlines the regions of ``no_grad`` and ``autocast``, turns indices that were read from tensors into tensors, and
    removes dead operations.

    Raises:
        ModelError: Forward enables gradients or autocast inside, which a unit (stage of the model) could not repeat.
    """
    _inline_regions(module)
    _select_by_tensors(module.graph)
    # Dead operations, torch's checks among them, but not writes in place.
    for node in reversed(module.graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not writes(node):
            module.graph.erase_node(node)
    return module.graph


def _inline_regions(module: fx.GraphModule) -> None:
    """Replace the regions of ``no_grad`` and ``autocast`` by their operations, in place.

    Raises:
        ModelError: A region enables gradients or autocast.
    """
    regions = torch.ops.higher_order
    for node in list(module.graph.nodes):
        if node.target is regions.wrap_with_set_grad_enabled:
            if node.args[0]:
                raise ModelError("a forward with torch.enable_grad inside cannot be cut; remove it")
            _inline(module, node, first=1, detached=True)
        elif node.target is regions.wrap_with_autocast:
            if node.args[2]:
                raise ModelError(
                    "a forward with torch.autocast inside cannot be cut; remove it", refused=True
                )
            _inline(module, node, first=4, detached=False)


def _inline(module: fx.GraphModule, node: fx.Node, *, first: int, detached: bool) -> None:
    """Replace a region by the operations of its graph.

    Args:
        module: Module whose graph contains the region.
        node: Call of the region.
        first: Index of the argument that is the region's graph. The inputs follow it.
        detached: Detach the results, as a region without gradients does.
    """
    body = cast(fx.GraphModule, module.get_submodule(arguments(node)[first].target))
    _inline_regions(body)
    inputs = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
    values = dict(zip(inputs, arguments(node)[first + 1 :], strict=True))
    with module.graph.inserting_before(node):
        results = cast(tuple[fx.Node, ...], module.graph.graph_copy(body.graph, values))
        for user in list(node.users):
            assert user.target is operator.getitem
            result = results[arguments(user)[1]]
            if detached:  # which gives the same gradients as the region
                detach = module.graph.call_function(_aten.detach.default, (result,))
                detach.meta = dict(result.meta)
                result = detach
            user.replace_all_uses_with(result)
            module.graph.erase_node(user)
    module.graph.erase_node(node)


def _select_by_tensors(graph: fx.Graph) -> None:
    """Replace each index that torch.export read from a tensor, as in ``table[counter % 5]``, by a tensor.

    The number would be a constant of the graph, although the buffer ``counter`` changes in each step.
    """
    for node in [node for node in graph.nodes if node.target is _aten.select.int]:
        tensor, dim, number = arguments(node)
        if not isinstance(number, fx.Node) or number.target is not _aten.item.default:
            continue
        (position,) = arguments(number)
        value, size = position.meta["val"], tensor.meta["val"].shape[dim]
        if not isinstance(size, int):
            continue
        with graph.inserting_before(node):  # a negative position counts from the end
            index = graph.call_function(_aten.remainder.Scalar, (position, size))
            row = graph.call_function(_aten.unsqueeze.default, (index, 0))
            selected = graph.call_function(_aten.index_select.default, (tensor, dim, row))
        results = (index, value), (row, value.unsqueeze(0)), (selected, node.meta["val"].unsqueeze(dim))
        for each, result in results:
            each.meta.update(origin_of(node), val=result)
        node.target, node.args = _aten.squeeze.dim, (selected, dim)


def fill_by_size(graph: fx.Graph, source: fx.Node) -> None:
    """Rewrite tensors filled with one value (``zeros_like``, ``new_ones``) to depend only on the batch size.

    Otherwise the tensor whose shape they copy would be live until then, and no cut could lie in between.

    Args:
        graph: Graph, changed in place.
        source: Node of the input, from which the batch size is read.
    """
    batch = source.meta["val"].shape[0]
    with graph.inserting_after(source):
        rows = graph.call_function(_aten.sym_size.int, (source, 0))
    rows.meta["val"] = batch
    for node in [node for node in graph.nodes if node.target in _FILLINGS]:
        value, shape = node.meta["val"], node.meta["val"].shape
        fixed = all(isinstance(size, int) or size.node.expr == batch.node.expr for size in shape)
        filling = _FILLINGS[node.target] if _FILLINGS[node.target] is not None else node.args[-1]
        if not fixed or isinstance(filling, fx.Node):
            continue
        sizes = [size if isinstance(size, int) else rows for size in shape]
        with graph.inserting_before(node):
            options = {"dtype": value.dtype, "device": value.device}
            full = graph.call_function(_aten.full.default, (sizes, filling), options)
        full.meta = node.meta
        node.replace_all_uses_with(full)
        graph.erase_node(node)


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments of ``node``."""
    return cast(tuple[Any, ...], node.args)


def writes(node: fx.Node) -> bool:
    """Return True if the operation of ``node`` changes one of its arguments in place."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def is_random(node: fx.Node) -> bool:
    """Return True if the operation of ``node`` can draw random numbers, whatever its arguments are."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def random_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the operations of a graph that draw random numbers with their arguments, except dropout, which can become
    a layer.
    """
    return [node for node in graph.nodes if _draws(node)]


def _draws(node: fx.Node) -> bool:
    """Return True if ``node`` draws random numbers with its arguments, and is no dropout."""
    if node.target is _aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    if not is_random(node) or node.target is _aten.dropout.default:
        return False
    # aten.rrelu and aten.alpha_dropout draw only if their flag for training, by default False, is set.
    declared = [argument.name for argument in cast(torch._ops.OpOverload, node.target)._schema.arguments]
    values = {**dict(zip(declared, node.args, strict=False)), **node.kwargs}
    return all(values.get(name, False) for name in ("train", "training") if name in declared)


def vmap_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that enter or leave ``torch.vmap``. They cannot run outside of the mapped function."""
    return [
        node
        for node in graph.nodes
        if getattr(node.target, "__module__", "") == "torch._functorch.predispatch"
    ]


def paths_of(node: fx.Node) -> tuple[str, ...]:
    """Return the paths of the submodules in whose forward the operation was called, outermost first, without the root."""
    stack = node.meta.get("nn_module_stack", {}).values()
    # The second call of a submodule has a suffix.
    paths = (str(path).split("@")[0] for path, kind in stack if path != kind)
    return tuple(path for path in paths if path)


def path_of(node: fx.Node) -> str:
    """Return the path of the innermost submodule in whose forward the operation was called, "" for the root."""
    return next(reversed(paths_of(node)), "")


def module_of(node: fx.Node) -> str:
    """Return the innermost submodule in whose forward the operation was called, as ``path (class)``.

    For the root it is only the class; "" if it is unknown.
    """
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if not stack:
        return ""
    kind = stack[-1][1]
    name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    path = path_of(node)
    return f"{path} ({name})" if path else name


def origin_of(node: fx.Node) -> dict[str, Any]:
    """Return the entries of ``node.meta`` about the user's code, to copy them to a node that replaces ``node``.

    :func:`module_of` and :func:`edgefl.models.user_code.source_of` read them.
    """
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
