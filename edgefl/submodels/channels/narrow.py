"""Narrower model for a selection of channels: the same modules with smaller tensors, verified by a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from edgefl.errors import ModelError
from edgefl.models.copies import copy_module
from edgefl.models.spec import ModelSpec
from edgefl.submodels.channels.axes import ONE, Atom, Axes, Axis, Concat, ProductAxis, atoms, resolve
from edgefl.submodels.channels.resize import adapt, follow, resize, rewrite
from edgefl.submodels.channels.selection import Channels, Prefer, Selection, counts, kept, leading, regions
from edgefl.submodels.channels.trace import trace_axes
from edgefl.wire.regions import BlockRegion, Region

_WAYS: tuple[Prefer, ...] = ("inner", "always_inner", "outer", "neither")


def channels_of(spec: ModelSpec) -> Channels:
    """Return the structure of a model's dimensions, which shows what can be cut. Cached per model.

    If the code gives sizes to tensors (an initial state of zeros, a token that it expands), one cut is tried. If
    these sizes do not follow the cut, the dimensions that depend on them are kept whole.
    """
    if spec not in _known:
        _known[spec] = _analyze(spec)
    return _known[spec]


_known: WeakKeyDictionary[ModelSpec, Channels] = WeakKeyDictionary()


def _analyze(spec: ModelSpec) -> Channels:
    following = Channels.of(trace_axes(spec.module, spec.sample))
    if not following.is_loose or _can_halve(spec, following):
        return following
    fixed = Channels.of(trace_axes(spec.module, spec.sample, fixed=True))
    return fixed if _can_halve(spec, fixed) else following


def _can_halve(spec: ModelSpec, channels: Channels) -> bool:
    try:
        fit_cut(spec, channels, lambda size: (size + 1) // 2)
    except ModelError:
        return False
    return True


def fit_cut(
    spec: ModelSpec, channels: Channels, keep: Callable[[int], int]
) -> tuple[Mapping[Atom, int], nn.Sequential]:
    """Return (number of kept indices by atom, model of the first indices) for the first of several ways to cut that
    works.

    An atom is a group of indices that is cut as one, such as the channels of a layer.

    Args:
        spec: Model.
        channels: Structure of its dimensions (:func:`channels_of`).
        keep: Function from the size of an atom to the number of indices to keep.

    Raises:
        ModelError: :func:`narrow` accepts none of the cuts. The first cut's error is raised.
    """
    refused: ModelError | None = None
    tried: list[Mapping[Atom, int]] = []
    for prefer, tied in itertools.product(_WAYS, (False, True)):
        counted = counts(channels, keep, prefer, tied=tied)
        if counted not in tried:
            tried.append(counted)
            try:
                return counted, narrow(spec, channels, leading(counted))
            except ModelError as error:
                refused = refused or error
    assert refused is not None
    raise refused


def narrow(spec: ModelSpec, channels: Channels, selection: Selection) -> nn.Sequential:
    """Return a smaller copy of the model with the entries that ``selection`` keeps, under the same tensor names.

    A run without values checks that its channels are the selected ones. If they are not, sizes in attributes of the
    user's modules are adapted, and the run is repeated.

    Args:
        spec: Model, which does not change.
        channels: Structure of its dimensions (:func:`channels_of`).
        selection: Kept indices of each atom (group of indices that is cut as one). An atom without an entry is
            kept whole.

    Raises:
        ModelError: The code stores a size in another way, or would read the kept entries in another order. The
            error names the unit (stage of the model) and the line.
    """
    try:
        return _try_narrow(spec, channels, selection, adapted=False)
    except ModelError as refused:
        try:
            return _try_narrow(spec, channels, selection, adapted=True)
        except ModelError:
            raise refused from None


def _try_narrow(spec: ModelSpec, channels: Channels, selection: Selection, *, adapted: bool) -> nn.Sequential:
    made = _copy_cut(spec.module, regions(channels, selection))
    resize(made)
    rewrite(made, channels.places, selection)
    if adapted:
        adapt(made, channels, selection)

    def before(path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            follow(module, args[0])
            follow(made.get_submodule(path), args[0])

    made_channels = Channels.of(trace_axes(made, spec.sample, before))
    for name, axes in made_channels.axes.items():
        _check(name, axes, channels.axes[name], selection)
    return made


def _copy_cut(module: nn.Sequential, parts: Mapping[str, Region]) -> nn.Sequential:
    """Return a deep copy of ``module`` whose tensors are reduced to the kept entries in ``parts``, by name.

    None keeps the whole tensor.
    """
    memo: dict[int, object] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        cut = _cut(tensor.detach(), parts[name])
        memo[id(tensor)] = (
            nn.Parameter(cut, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cut
        )
    return copy_module(module, memo)


def _cut(tensor: Tensor, region: Region) -> Tensor:
    if not isinstance(region, BlockRegion):
        return tensor.clone()
    for dim, positions in enumerate(region.axes):
        if positions is not None:
            tensor = tensor.index_select(dim, torch.tensor(positions, device=tensor.device))
    return tensor.clone()


def _check(name: str, found: Axes, whole: Axes, selection: Selection) -> None:
    """Raise ModelError unless the narrow model reads the dimensions of tensor ``name`` in the order of the whole model.

    Args:
        name: Name of the tensor, for the error text.
        found: Its axes in the narrow model.
        whole: Its axes in the whole model.
        selection: Kept indices of the whole model's atoms (groups of indices that are cut as one).
    """
    made: dict[Atom, Axis] = {}
    for dim, (axis, before) in enumerate(zip(found, whole, strict=True)):
        wanted = _nested_sizes(resolve(_cut_axis(before, selection, made)))
        if not selection.keys().isdisjoint(atoms(before)) and _nested_sizes(axis) != wanted:
            raise ModelError(
                f"dimension {dim} of {name!r} would be read in another order: the whole model takes it for "
                f"{_shape_text(before)}, what is left of it for {_shape_text(axis)}",
                tensor=name,
            )


def _cut_axis(axis: Axis, selection: Selection, made: dict[Atom, Axis]) -> Axis:
    """Return ``axis`` with the sizes that ``selection`` keeps.

    ``made`` caches the new atom (group of indices that is cut as one) of each atom across calls.
    """
    if isinstance(axis, Atom):
        return made.setdefault(axis, resolve(Atom(kept(axis, selection))))
    if isinstance(axis, ProductAxis):
        return ProductAxis(tuple(_cut_axis(factor, selection, made) for factor in axis.factors))
    return Concat(tuple(_cut_axis(part, selection, made) for part in axis.parts))


def _nested_sizes(axis: Axis) -> Any:
    """Return the sizes of an axis (structure of a dimension) and their nesting as numbers and tuples, for comparison.

    The atoms (groups of indices that are cut as one) themselves are not compared, because two analyses may keep
    different ones whole.
    """
    if isinstance(axis, Atom):
        return axis.size
    if axis == ONE:
        return 1
    inner = axis.factors if isinstance(axis, ProductAxis) else axis.parts
    return (type(axis).__name__, *map(_nested_sizes, inner))


def _shape_text(axis: Axis) -> str:
    """Return the structure of an axis as text for an error, such as ``(4 x 16)`` or ``(8 + 8)``."""
    if isinstance(axis, Atom) or axis == ONE:
        return str(axis.size if isinstance(axis, Atom) else 1)
    sign, inner = (" x ", axis.factors) if isinstance(axis, ProductAxis) else (" + ", axis.parts)
    return "(" + sign.join(map(_shape_text, inner)) + ")"
