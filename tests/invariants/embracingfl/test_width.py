"""EmbracingFL I13: width reduction, the leading channels of every layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import Tensors
from edgefl.errors import ModelError
from edgefl.models.zoo.basic import mlp
from edgefl.models.zoo.resnet import resnet8, resnet20
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.submodel import Submodel
from edgefl.submodels.width.submodel import Width
from edgefl.wire.regions import Block, extract, local_shape
from tests.invariants.embracingfl.tiny import samples, tiny, walk
from tests.support.arrays import as_tensors, weights_of
from tests.support.reference import partial_average, run_round
from tests.support.regions import assert_inside


@pytest.mark.parametrize(
    ("ratio", "kept", "parameters"), [(0.45, (7, 14, 28), 52_874), (0.20, (3, 6, 12), 10_006)]
)
def test_i13_channels_of_the_papers_tiers(ratio: float, kept: tuple[int, int, int], parameters: int) -> None:
    part = Width(resnet20(), ratio, "floor")
    regions, local = part.regions(), part.suffix.state_dict()
    last_of_stage = ("block3", "block6", "block9")
    assert tuple(local[f"{unit}.conv2.weight"].shape[0] for unit in last_of_stage) == kept
    assert sum(parameter.numel() for parameter in part.suffix.parameters()) == parameters
    assert regions["stem.conv.weight"] == Block((range(kept[0]), None, None, None)), "input channels stay"
    assert regions["head.dense.weight"] == Block((None, range(kept[2]))), "classes stay"
    assert regions["head.dense.bias"] is None
    assert regions["block4.shortcut.conv.weight"] == Block((range(kept[1]), range(kept[0]), None, None))
    assert regions["block4.bn1.running_var"] == Block((range(kept[1]),))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(ratios=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=2))
def test_i13_slices_are_nested_prefixes(ratios: list[float]) -> None:
    spec = resnet8(size=8, widths=(8, 12, 20))
    shapes = {name: tuple(tensor.shape) for name, tensor in spec.weights.items()}
    small, large = (Width(spec, ratio, "floor").regions() for ratio in sorted(ratios))
    assert set(small) == set(large) == set(spec.weights)
    for regions in (small, large):
        assert_inside(regions, shapes)
        axes = [axis for region in regions.values() if isinstance(region, Block) for axis in region.axes]
        assert all(axis is None or axis == range(len(axis)) for axis in axes)
    for name in spec.weights:
        inner, outer = (local_shape(name, regions[name], shapes) for regions in (small, large))
        assert all(few <= many for few, many in zip(inner, outer, strict=True))


@settings(max_examples=6, deadline=None)
@given(ratio=st.floats(0.05, 1.0))
def test_i13_extracted_tensors_fit_the_narrow_model(ratio: float) -> None:
    spec = resnet8(size=8, widths=(8, 12, 20))
    part = Width(spec, ratio, "floor")
    local = _local(part)
    part.suffix.load_state_dict(local, strict=True)
    assert sum(int(mask.sum()) for mask in _coverage(part).values()) == sum(
        tensor.numel() for tensor in local.values()
    )


def test_i13_ratio_one_equals_fedavg_bit_for_bit() -> None:
    spec = tiny("resnet8")
    whole, sliced = OutputSide(spec, 0), Width(spec, 1.0)
    assert set(sliced.regions().values()) == {None}
    x, y = samples(spec, 8)
    averages = []
    for part in (whole, sliced):
        algorithm = sgd(Objective.of(part), batch=4, steps=3)
        update = run_round(algorithm, _local(part), walk(x, y, 4)).update
        averages.append(partial_average(spec.weights, [(_placed(part), update)]))
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in spec.weights)


def test_i13_covered_entries_alone_are_averaged() -> None:
    spec = tiny("resnet8")
    parts = [Width(spec, 0.5), Width(spec, 0.75)]
    uploads = []
    for shift, part in enumerate(parts, start=1):
        uploads.append((part.regions(), {k: v + shift for k, v in _local(part).items()}))

    averaged = partial_average(spec.weights, uploads)

    small, large = map(_coverage, parts)
    for name, old in spec.weights.items():
        held_by = small[name] + large[name]
        # Held by both: mean of +1 and +2. Held by the wide one only: +2. Held by nobody: unchanged.
        moved = torch.where(held_by == 2, 1.5, torch.where(held_by == 1, 2.0, 0.0))
        torch.testing.assert_close(averaged[name], old + moved)
    assert any(bool((large[name] == 0).any()) for name in spec.weights)


def test_i13_a_sliced_client_trains_and_returns_its_local_shapes() -> None:
    spec = tiny("resnet8")
    part = Width(spec, 0.5)
    x, y = samples(spec, 8)
    algorithm = sgd(Objective.of(part), batch=4, steps=2)
    local = _local(part)
    update = run_round(algorithm, local, walk(x, y, 4)).update
    shapes = {name: tuple(tensor.shape) for name, tensor in spec.weights.items()}
    for name, tensor in update.items():
        assert tuple(tensor.shape) == local_shape(name, part.regions()[name], shapes)
    assert not torch.equal(update["stem.conv.weight"], local["stem.conv.weight"])


def test_i13_models_without_anything_to_cut_and_wrong_ratios_are_refused() -> None:
    with pytest.raises(ModelError, match="nothing in mlp can be cut by width"):
        Width(mlp(hidden=()), 0.5)
    with pytest.raises(ModelError, match=r"\(0, 1\]"):
        Width(resnet8(), 0.0)


def _placed(part: Submodel) -> dict[str, object]:
    return dict(part.place(weights_of(part.spec), 1).regions)


def _local(part: Submodel) -> Tensors:
    """What a device starts from."""
    arrays = weights_of(part.spec)
    local = extract(arrays, part.place(arrays, 1).regions)
    return as_tensors(local)


def _coverage(part: Width) -> Tensors:
    """Per global tensor, 1.0 where the slice holds the entry and 0.0 elsewhere."""
    found = {}
    for name, region in part.regions().items():
        whole = tuple(part.spec.weights[name].shape)
        covered = torch.zeros(whole).reshape(-1)
        covered[torch.from_numpy(region.positions(whole)) if isinstance(region, Block) else slice(None)] = 1.0
        found[name] = covered.reshape(whole)
    return found
