"""Changes of layers and graphs that make them fit the new sizes of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.fx.node import Argument

from edgefl.models.layers.norms import BatchNorm
from edgefl.submodels.channels.axes import Axes, Axis, atoms, size
from edgefl.submodels.channels.selection import Channels, Selection, indices, kept
from edgefl.submodels.channels.trace import Place

Sizes = dict[str, Any]
Norm = nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm
Conv = nn.modules.conv._ConvNd


def resize(module: nn.Module) -> None:
    """Set the size attributes of all torch layers in ``module`` from the shapes of their tensors."""
    for part in module.modules():
        for kind, sizes in _BY_WEIGHT.items():
            if isinstance(part, kind):
                _assign(part, sizes(part))


def follow(module: nn.Module, x: Tensor) -> None:
    """Set the sizes of layer ``module`` that its tensors do not determine, such as groups, from its input ``x``, in
    place.
    """
    if isinstance(module, Conv) and not module.transposed and module.groups > 1:
        groups = x.shape[1] // module.weight.shape[1]
        _assign(module, {"groups": groups, "in_channels": x.shape[1]})
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is None:
        _assign(module, {"normalized_shape": tuple(x.shape[-len(module.normalized_shape) :])})
    elif isinstance(module, nn.GroupNorm) and module.weight is None:
        _assign(module, _groups(module, x.shape[1]))
    elif (
        isinstance(module, nn.modules.batchnorm._NormBase)
        and module.running_mean is None
        and not module.affine
    ):
        _assign(module, {"num_features": x.shape[1]})


def _assign(module: nn.Module, sizes: Sizes) -> None:
    for name, value in sizes.items():
        setattr(module, name, value)


def _shape(tensor: Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.shape)


def _linear(layer: nn.Linear) -> Sizes:
    return {"out_features": layer.weight.shape[0], "in_features": layer.weight.shape[1]}


def _bilinear(layer: nn.Bilinear) -> Sizes:
    names = ("out_features", "in1_features", "in2_features")
    return dict(zip(names, layer.weight.shape, strict=True))


def _conv(layer: Conv) -> Sizes:
    first, second = layer.weight.shape[:2]
    if layer.transposed:
        return {"in_channels": first, "out_channels": second * layer.groups}
    return {"out_channels": first, "in_channels": second * layer.groups}


def _norm(layer: nn.modules.batchnorm._NormBase) -> Sizes:
    known = layer.weight if layer.weight is not None else layer.running_mean
    return {} if known is None else {"num_features": known.shape[0]}


def _own_norm(layer: BatchNorm) -> Sizes:
    known = layer.weight if layer.weight is not None else getattr(layer, "running_mean", None)
    return {} if known is None else {"channels": known.shape[0]}


def _layer_norm(layer: nn.LayerNorm | nn.RMSNorm) -> Sizes:
    return {} if layer.weight is None else {"normalized_shape": _shape(layer.weight)}


def _group_norm(layer: nn.GroupNorm) -> Sizes:
    return {} if layer.weight is None else _groups(layer, layer.weight.shape[0])


def _groups(layer: nn.GroupNorm, channels: int) -> Sizes:
    """Return the size attributes of a group norm. One group per channel stays so; otherwise the number of groups stays."""
    alone = layer.num_groups == layer.num_channels
    return {"num_channels": channels, "num_groups": channels if alone else layer.num_groups}


def _embedding(layer: nn.Embedding | nn.EmbeddingBag) -> Sizes:
    return {"num_embeddings": layer.weight.shape[0], "embedding_dim": layer.weight.shape[1]}


def _recurrent(layer: nn.RNNBase) -> Sizes:
    kernel, recurrent = cast(Tensor, layer.weight_ih_l0), cast(Tensor, layer.weight_hh_l0)
    sizes = {"input_size": kernel.shape[1], "hidden_size": recurrent.shape[1]}
    if layer.proj_size:
        sizes |= {"hidden_size": kernel.shape[0] // 4, "proj_size": recurrent.shape[1]}
    return sizes


def _attention(layer: nn.MultiheadAttention) -> Sizes:
    # The width between projections and heads; that of the input is the same in code that splits by this attribute.
    inner = layer.out_proj.weight.shape[1]
    return {"embed_dim": inner, "kdim": inner, "vdim": inner, "head_dim": inner // layer.num_heads}


def _cell(layer: nn.RNNCellBase) -> Sizes:
    return {"input_size": layer.weight_ih.shape[1], "hidden_size": layer.weight_hh.shape[1]}


_BY_WEIGHT: Mapping[type[nn.Module], Callable[[Any], Sizes]] = {
    nn.Linear: _linear,
    nn.Bilinear: _bilinear,
    Conv: _conv,
    nn.modules.batchnorm._NormBase: _norm,
    BatchNorm: _own_norm,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding,
    nn.RNNBase: _recurrent,
    nn.RNNCellBase: _cell,
    nn.MultiheadAttention: _attention,
}


def adapt(module: nn.Module, channels: Channels, selection: Selection) -> None:
    """Set integer attributes of the user's modules that equal an uncut size of their tensors to the cut size, in place.

    A number that is the size of several dimensions with different cuts is not changed.

    Args:
        module: Narrow model.
        channels: Structure of the whole model's dimensions.
        selection: Kept indices of atoms (groups of indices that are cut as one).
    """
    for path, part in module.named_modules():
        if type(part).__module__.startswith(("torch.", "edgefl.")):
            continue
        left = _kept_sizes(path, channels, selection)
        for name, value in list(vars(part).items()):
            if type(value) is int and len(left.get(value, ())) == 1 and not name.startswith("_"):
                (number,) = left[value]
                setattr(part, name, number)


def _kept_sizes(path: str, channels: Channels, selection: Selection) -> dict[int, set[int]]:
    """Return the sizes after the cut by the size before it, for all dimensions of the tensors below ``path``.

    Sizes of single atoms (groups of indices) of these dimensions are included.
    """
    sizes_left: dict[int, set[int]] = {}
    for name, axes in channels.axes.items():
        if not path or name.startswith(f"{path}."):
            for axis in axes:
                for part in (axis, *atoms(axis)):
                    sizes_left.setdefault(size(part), set()).add(kept(part, selection))
    return sizes_left


def rewrite(module: nn.Module, places: Mapping[Place, Axes], selection: Selection) -> None:
    """Replace sizes that are constants in the graphs of ``module``, such as those of ``view``, by the kept sizes.

    Args:
        module: Narrow model, changed in place.
        places: Axes of the result of each operation, by (path of the graph, position of the operation).
        selection: Kept indices of atoms (groups of indices that are cut as one).
    """
    for path, part in module.named_modules():
        if isinstance(part, fx.GraphModule):
            order = {node: position for position, node in enumerate(part.graph.nodes)}
            axes = {node: places[path, at] for node, at in order.items() if (path, at) in places}
            for node in axes:
                if node.op in ("call_function", "call_method"):
                    _rewrite(node, axes, selection)
            part.recompile()


def _rewrite(node: fx.Node, axes: Mapping[fx.Node, Axes], selection: Selection) -> None:
    schema = getattr(node.target, "_schema", None)
    for position, declared in enumerate(schema.arguments if schema is not None else ()):
        inside = position < len(node.args)
        value = node.args[position] if inside else node.kwargs.get(declared.name)
        new = _resize_argument(node, declared.name, value, axes, selection)
        if inside and new is not value:
            node.update_arg(position, new)
        elif new is not value:
            node.update_kwarg(declared.name, new)


def _resize_argument(
    node: fx.Node, name: str, value: Argument, axes: Mapping[fx.Node, Axes], selection: Selection
) -> Argument:
    """Return ``value``, the argument ``name`` of ``node``, with the sizes that the selection keeps.

    An argument that holds no size is returned unchanged.
    """
    own = axes[node]
    if name in ("size", "shape", "sizes", "normalized_shape") and isinstance(value, list | tuple):
        first = len(own) - len(value)
        if name == "sizes":  # unflatten: its dim counts in the tensor before, which has one dim for all these
            first = int(node.args[1]) % (first + 1)  # type: ignore[arg-type]
        return [_kept_size(number, axis, selection) for number, axis in zip(value, own[first:], strict=False)]
    base = node.args[0] if node.args else None
    if name in ("start", "end") and isinstance(value, int) and isinstance(base, fx.Node) and base in axes:
        dim = node.args[1] if len(node.args) > 1 else 0
        return _kept_offset(value, axes[base][int(dim)], selection)  # type: ignore[arg-type]
    if name in ("split_size", "split_sizes") and not isinstance(value, fx.Node):
        parts: Argument = _split_sizes(node, value, axes, selection)
        return parts
    return value


def _kept_size(number: Any, axis: Axis, selection: Selection) -> Any:
    left = kept(axis, selection)
    return left if isinstance(number, int) and number > 1 and left != number else number


def _kept_offset(index: int, axis: Axis, selection: Selection) -> int:
    """Return the number of kept indices of ``axis`` below ``index``. Return ``index`` itself if ``axis`` has no such
    index.
    """
    whole = kept(axis, {})
    if not 0 <= index <= whole:
        return index
    return sum(1 for kept_index in indices(axis, selection) if kept_index < index)


def _split_sizes(node: fx.Node, value: Any, axes: Mapping[fx.Node, Axes], selection: Selection) -> Any:
    """Return the split sizes of ``node`` that the selection keeps: a list, or a number if ``value`` is one."""
    dim = int(node.args[2]) if len(node.args) > 2 else int(node.kwargs.get("dim", 0))  # type: ignore[arg-type]
    lengths: dict[int, int] = {}
    for user in node.users:
        if user in axes:
            lengths[int(user.args[1])] = kept(axes[user][dim], selection)  # type: ignore[arg-type]
    if isinstance(value, int):
        return lengths.get(0, value)
    return [lengths.get(at, number) for at, number in enumerate(value)]
