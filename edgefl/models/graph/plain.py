"""A graph as torch exports it, made plain: one level, only what is needed."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from edgefl.errors import ModelError

# None: the value is the last argument.
_FILLINGS = {
    torch.ops.aten.zeros_like.default: 0,
    torch.ops.aten.new_zeros.default: 0,
    torch.ops.aten.ones_like.default: 1,
    torch.ops.aten.new_ones.default: 1,
    torch.ops.aten.full_like.default: None,
    torch.ops.aten.new_full.default: None,
}


def cleaned(module: fx.GraphModule) -> fx.Graph:
    """The graph of ``module`` in place: regions inlined, positions left in their tensors, dead operations gone."""
    _inline_regions(module)
    _select_by_tensors(module.graph)
    _drop_unused(module.graph)
    return module.graph


def _select_by_tensors(graph: fx.Graph) -> None:
    """Replace each index that torch.export reads out of a tensor, as in ``table[counter % 5]``, by one that stays in it."""
    aten = torch.ops.aten
    for node in [node for node in graph.nodes if node.target is aten.select.int]:
        tensor, dim, number = arguments(node)
        if not isinstance(number, fx.Node) or number.target is not aten.item.default:
            continue
        (position,) = arguments(number)
        value, size = position.meta["val"], tensor.meta["val"].shape[dim]
        if not isinstance(size, int):
            continue
        with graph.inserting_before(node):  # a negative position counts from the end
            place = graph.call_function(aten.remainder.Scalar, (position, size))
            row = graph.call_function(aten.unsqueeze.default, (place, 0))
            made = graph.call_function(aten.index_select.default, (tensor, dim, row))
        results = (place, value), (row, value.unsqueeze(0)), (made, node.meta["val"].unsqueeze(dim))
        for each, result in results:
            each.meta.update(told_by(node), val=result)
        node.target, node.args = aten.squeeze.dim, (made, dim)


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of ``node``."""
    return cast(tuple[Any, ...], node.args)


def paths_of(node: fx.Node) -> tuple[str, ...]:
    """Paths of the submodules in whose forward the operation was called, outermost first; the root is none."""
    stack = node.meta.get("nn_module_stack", {}).values()
    # A second call of a submodule is told apart by a suffix.
    paths = (str(path).split("@")[0] for path, kind in stack if path != kind)
    return tuple(path for path in paths if path)


def path_of(node: fx.Node) -> str:
    """Path of the innermost submodule in whose forward the operation was called; empty for the root."""
    return next(reversed(paths_of(node)), "")


def module_of(node: fx.Node) -> str:
    """Path, and class in brackets, of the innermost submodule in whose forward the operation was called.

    The class alone for the root; empty if unknown.
    """
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if not stack:
        return ""
    kind = stack[-1][1]
    name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    path = path_of(node)
    return f"{path} ({name})" if path else name


def told_by(node: fx.Node) -> dict[str, Any]:
    """What :func:`module_of` and ``source_of`` (:mod:`edgefl.models.user_code`) read, for a node in place of ``node``."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def _drop_unused(graph: fx.Graph) -> None:
    """Remove operations that nothing needs, torch's checks among them, but not writes in place."""
    for node in reversed(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        writes = schema is not None and schema.is_mutable
        if node.op in ("call_function", "get_attr") and not node.users and not writes:
            graph.erase_node(node)


def draws(graph: fx.Graph) -> list[fx.Node]:
    """The operations that draw random numbers, but for dropout, which can become a layer."""
    return [node for node in graph.nodes if _draws(node)]


def vectorised(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that enter or leave ``torch.vmap``; they cannot run outside of it, one by one."""
    return [
        node
        for node in graph.nodes
        if getattr(node.target, "__module__", "") == "torch._functorch.predispatch"
    ]


def _draws(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return random and node.target is not torch.ops.aten.dropout.default and _in_training(node)


def _in_training(node: fx.Node) -> bool:
    """Whether an operation that draws in training alone, as ``aten.rrelu`` and ``aten.alpha_dropout``, is told to."""
    target = cast(torch._ops.OpOverload, node.target)
    declared = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(declared, node.args, strict=False)), **node.kwargs}
    # Where it is not given, `training` is false.
    return all(given.get(name, False) for name in ("train", "training") if name in declared)


def free_fillings(graph: fx.Graph, source: fx.Node) -> None:
    """Make tensors of one value that copy a size (``zeros_like``, ``new_ones``) depend on that size alone."""
    batch = source.meta["val"].shape[0]
    with graph.inserting_after(source):
        rows = graph.call_function(torch.ops.aten.sym_size.int, (source, 0))
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
            full = graph.call_function(torch.ops.aten.full.default, (sizes, filling), options)
        full.meta = node.meta
        node.replace_all_uses_with(full)
        graph.erase_node(node)


def _inline_regions(module: fx.GraphModule) -> None:
    """Put the operations of ``no_grad`` and ``autocast(enabled=False)`` regions into the graph that calls them.

    What a ``no_grad`` region returns is detached, which gives the same gradients.
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
    """Replace ``node``, whose argument ``first`` is a graph and the rest its inputs, by that graph's operations."""
    body = cast(fx.GraphModule, module.get_submodule(arguments(node)[first].target))
    _inline_regions(body)
    inputs = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
    values = dict(zip(inputs, arguments(node)[first + 1 :], strict=True))
    with module.graph.inserting_before(node):
        results = cast(tuple[fx.Node, ...], module.graph.graph_copy(body.graph, values))
        for user in list(node.users):
            assert user.target is operator.getitem
            result = results[arguments(user)[1]]
            if detached:
                detach = module.graph.call_function(torch.ops.aten.detach.default, (result,))
                detach.meta = dict(result.meta)
                result = detach
            user.replace_all_uses_with(result)
            module.graph.erase_node(user)
    module.graph.erase_node(node)
