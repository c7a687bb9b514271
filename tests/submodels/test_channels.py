"""Which dimensions hang together: the algebra of axes, and what models say of theirs."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.resnet import resnet18
from edgefl.submodels.channels.axes import (
    ONE,
    Atom,
    Axis,
    Concat,
    ProductAxis,
    UnalignedError,
    divide,
    is_pinned,
    regroup,
    resolve,
    size,
    take,
    unify,
)
from edgefl.submodels.channels.selection import Channels, Selection, indices, kept, regions
from edgefl.submodels.channels.trace import trace_axes
from edgefl.submodels.cost import macs
from edgefl.submodels.width.submodel import channels_of
from edgefl.wire.regions import BlockRegion, extract
from tests.rings.rows import mostly_slow
from tests.submodels.nets import MODELS, Sorted, model, rows, whole
from tests.support.arrays import as_tensors, weights_of


def test_a_view_of_one_dimension_as_two_makes_its_atom_a_product() -> None:
    channels = Atom(12)
    outer, inner = regroup([channels], (3, 4))
    assert resolve(channels) == ProductAxis((outer, inner)) and (size(outer), size(inner)) == (3, 4)


def test_views_merge_dimensions_and_keep_what_does_not_change() -> None:
    batch, channels, side = Atom(2), Atom(6), Atom(5)
    assert regroup([batch, channels, side], (2, 30)) == (batch, ProductAxis((channels, side)))
    assert regroup([batch, channels, ONE], (2, 1, 6)) == (batch, ONE, channels)


def test_a_concatenation_that_is_divided_divides_its_parts_alike() -> None:
    one, other = Atom(6), Atom(4)
    outer, inner = divide(Concat((one, other)), 2)
    assert [size(part) for part in outer.parts] == [3, 2]
    assert resolve(one).factors[1] is resolve(other).factors[1] is inner


def test_a_part_that_is_taken_splits_the_atom_everywhere() -> None:
    channels = Atom(8)
    flat = ProductAxis((channels, Atom(3, "positions")))
    left, right = take(channels, 0, 5), take(channels, 5, 8)
    assert resolve(channels) == Concat((left, right))
    assert [size(part) for part in resolve(flat).parts] == [15, 9]


def test_gates_of_products_and_concatenations_are_one() -> None:
    hidden, gates, units = Atom(5), Atom(4), Atom(5)
    unify(Concat((hidden,) * 4), ProductAxis((gates, units)))
    assert resolve(units) is resolve(hidden) and list(resolve(gates).parts) == [ONE] * 4


def test_atoms_that_are_unified_share_the_reason_to_stay_whole() -> None:
    free, fixed = Atom(4), Atom(4, "the model's output")
    unify(free, fixed)
    assert resolve(free).reason == resolve(fixed).reason == "the model's output"


def test_structures_without_a_common_refinement_are_pinned_not_guessed() -> None:
    one, other = ProductAxis((Atom(2), Atom(3))), ProductAxis((Atom(3), Atom(2)))
    unify(one, other)
    assert is_pinned(one) and is_pinned(other)
    with pytest.raises(UnalignedError):
        take(ProductAxis((Atom(2), Atom(3))), 1, 5)
    uneven = regroup([ProductAxis((Atom(2), Atom(3))), Atom(2)], (4, 3))
    assert all(map(is_pinned, uneven)) and list(map(size, uneven)) == [4, 3]


def _axes(depth: int) -> st.SearchStrategy[Axis]:
    leaf = st.integers(1, 4).map(Atom)
    if depth == 0:
        return leaf
    inner = st.lists(_axes(depth - 1), min_size=1, max_size=3).map(tuple)
    return st.one_of(leaf, inner.map(ProductAxis), inner.map(Concat))


@given(axis=_axes(2), data=st.data())
def test_the_normal_form_keeps_sizes_and_the_order_of_indices(axis: Axis, data: st.DataObject) -> None:
    normal = resolve(axis)
    members = [atom for atom in _atoms(axis) if atom.size > 1]
    selection = {atom: range(data.draw(st.integers(1, atom.size))) for atom in members}
    assert size(normal) == size(axis) and kept(normal, selection) == kept(axis, selection)
    assert list(indices(normal, selection)) == _slowly(axis, selection)


def _atoms(axis: Axis) -> list[Atom]:
    if isinstance(axis, Atom):
        return [axis]
    inner = axis.factors if isinstance(axis, ProductAxis) else axis.parts
    return [atom for each in inner for atom in _atoms(each)]


def _slowly(axis: Axis, selection: Selection) -> list[int]:
    """The kept indices, by definition."""
    if isinstance(axis, Atom):
        return list(selection.get(axis, range(axis.size)))
    if isinstance(axis, Concat):
        starts = [sum(map(size, axis.parts[:at])) for at in range(len(axis.parts))]
        return [
            start + index
            for start, part in zip(starts, axis.parts, strict=True)
            for index in _slowly(part, selection)
        ]
    found = [0]
    for factor in axis.factors:
        found = [index * size(factor) + own for index in found for own in _slowly(factor, selection)]
    return found


SHAPES_OF_CHANNELS = ("resnet8", "Dense", "Shuffled", "bilstm", "vit", "Bare")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", mostly_slow(MODELS, SHAPES_OF_CHANNELS))
def test_changing_places_everywhere_computes_the_same(name: str) -> None:
    spec = model(name)
    channels = channels_of(spec)
    spec.module.double()  # so that sums in another order do not differ
    generator = torch.Generator().manual_seed(3)
    turned = {atom: tuple(torch.randperm(atom.size, generator=generator).tolist()) for atom in channels.atoms}

    other = _with(spec, channels, turned)

    x = rows(spec.sample)
    x = x.double() if x.is_floating_point() else x
    with torch.no_grad():
        expected, found = spec.module.eval()(x), other.eval()(x)
    assert len(turned) > 0
    assert any(not torch.equal(tensor, spec.weights[name]) for name, tensor in other.state_dict().items())
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def _with(spec: ModelSpec, channels: Channels, selection: Selection) -> torch.nn.Module:
    arrays = weights_of(spec)
    local = extract(arrays, regions(channels, selection))
    other = copy.deepcopy(spec.module)
    other.load_state_dict(as_tensors(local))
    return other


# Sizes of what can be cut, by what it is in the model.
FREE = {
    "Dense": [4, 4, 4, 6],
    "Grouped": [2, 2, 2, 3, 4],
    "Shuffled": [4, 6],
    "Encoder": [2, 4, 6, 8, 16],
    "Gru": [4, 6],
    "Elman": [4, 6],
    "Uneven": [4],
    "bilstm": [4, 4, 6],
    "mlp": [7, 9],
    "vit": [3, 3, 4, 4, 12, 48, 48],
}


@pytest.mark.parametrize("name", mostly_slow(FREE, ("Dense", "Shuffled", "bilstm", "mlp", "vit")))
def test_what_can_be_cut_in_a_model(name: str) -> None:
    assert sorted(atom.size for atom in channels_of(model(name)).atoms) == FREE[name]


def test_the_input_the_classes_and_positions_stay_and_say_why() -> None:
    axes = channels_of(model("resnet20")).axes
    assert axes["stem.conv.weight"][1].reason == "the model's input"
    assert axes["head.dense.weight"][0].reason == "the model's output"
    assert axes["stem.conv.weight"][2].reason.startswith("positions of a convolution")
    assert axes["stem.conv.weight"][0] is axes["block1.conv1.weight"][1] is axes["stem.bn.running_var"][0]


def test_an_operation_without_a_rule_is_named_with_its_line() -> None:
    channels = Channels.of(trace_axes(*_unit_of(Sorted())))
    reason = channels.axes["all.first.weight"][0].reason
    assert channels.atoms == ()
    assert "aten.sort" in reason and "in all" in reason and "nets.py:" in reason
    assert "dimension 0 of size 6 because of no rule" in channels.why_whole("all.first.weight")


def _unit_of(module: torch.nn.Module) -> tuple[torch.nn.Sequential, object]:
    spec = whole(module)
    return spec.module, spec.sample


def test_of_heads_and_their_entries_one_is_cut() -> None:
    channels = channels_of(model("vit"))
    inner, outer, neither = (
        sorted(atom.size for atom in channels.cut(prefer)) for prefer in ("inner", "outer", "neither")
    )
    assert inner == [4, 4, 12, 48, 48] and outer == [3, 3, 12, 48, 48] and neither == [12, 48, 48]


def test_a_cut_of_heads_takes_the_same_entries_of_each_head() -> None:
    channels = channels_of(model("vit"))
    (entries,) = {
        atom for atom in channels.cut() if ("block1.attention.out.weight", 1) in channels.holders[atom]
    }
    region = regions(channels, {entries: (0, 2)})["block1.attention.qkv.weight"]
    assert region == BlockRegion((tuple(4 * head + entry for head in range(9) for entry in (0, 2)), None))


def test_resnet18_takes_555_million_multiplications() -> None:
    spec = resnet18()
    assert round(macs(spec.module, spec.sample) / 1e6) == 555
