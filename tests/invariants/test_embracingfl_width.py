"""EmbracingFL I13: width reduction, the leading channels of every layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.models.basic import mlp
from edgefl.models.resnet import resnet8, resnet20
from edgefl.programs.objective import Objective
from edgefl.programs.sgd import sgd
from edgefl.simulation.average import partial_average
from edgefl.simulation.round import run_round
from edgefl.submodels.output_side import OutputSide
from edgefl.submodels.submodel import check_region, shape_of
from edgefl.submodels.width import WidthSlice
from edgefl.wire.errors import ModelError
from tests.invariants.embracingfl import samples, tiny, walk


@pytest.mark.parametrize(("ratio", "kept"), [(0.45, (7, 14, 28)), (0.20, (3, 6, 12))])
def test_i13_channels_kept_by_the_paper_s_tiers(ratio: float, kept: tuple[int, int, int]) -> None:
    part = WidthSlice(resnet20(), ratio)
    last_of_stage = ("block3", "block6", "block9")
    assert tuple(part.local.weights[f"{unit}.conv2.weight"].shape[0] for unit in last_of_stage) == kept
    assert part.regions["stem.conv.weight"] == ((0, kept[0]), (0, 3), (0, 3), (0, 3)), "input channels stay"
    assert part.regions["head.dense.weight"] == ((0, 10), (0, kept[2])), "classes stay"
    assert part.regions["head.dense.bias"] is None
    assert part.regions["block4.shortcut.conv.weight"] == ((0, kept[1]), (0, kept[0]), (0, 1), (0, 1))
    assert part.regions["block4.bn1.running_var"] == ((0, kept[1]),)


@settings(max_examples=20, deadline=None)
@given(ratios=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=2))
def test_i13_slices_are_nested_prefixes(ratios: list[float]) -> None:
    spec = resnet8(size=8, widths=(8, 12, 20))
    small, large = (WidthSlice(spec, ratio) for ratio in sorted(ratios))
    assert set(small.regions) == set(large.regions) == set(spec.weights)
    for name, whole in spec.weights.items():
        for part in (small, large):
            check_region(name, part.regions[name], tuple(whole.shape))
            assert all(start == 0 for start, _ in part.regions[name] or ())
        inner = shape_of(small.regions[name], tuple(whole.shape))
        outer = shape_of(large.regions[name], tuple(whole.shape))
        assert all(few <= many for few, many in zip(inner, outer, strict=True))


@settings(max_examples=20, deadline=None)
@given(ratio=st.floats(0.05, 1.0))
def test_i13_extracted_tensors_fit_the_narrow_model(ratio: float) -> None:
    spec = resnet8(size=8, widths=(8, 12, 20))
    part = WidthSlice(spec, ratio)
    local = part.extract(spec.weights)
    part.suffix.load_state_dict(local, strict=True)
    covered = part.coverage()
    assert sum(int(mask.sum()) for mask in covered.values()) == sum(t.numel() for t in local.values())


def test_i13_ratio_one_equals_fedavg_bit_for_bit() -> None:
    spec = tiny("resnet8")
    whole, sliced = OutputSide(spec, 0), WidthSlice(spec, 1.0)
    assert set(sliced.regions.values()) == {None}
    x, y = samples(spec, 8)
    averages = []
    for part in (whole, sliced):
        program = sgd(Objective.of(part), batch=4, steps=3)
        update = run_round(program, part.extract(spec.weights), walk(x, y, 4)).update
        averages.append(partial_average(spec.weights, [(part.regions, update)]))
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in spec.weights)


def test_i13_uncovered_entries_keep_their_value_and_covered_ones_are_averaged() -> None:
    spec = tiny("resnet8")
    parts = [WidthSlice(spec, 0.5), WidthSlice(spec, 0.75)]
    uploads = []
    for shift, part in enumerate(parts, start=1):
        uploads.append((part.regions, {k: v + shift for k, v in part.extract(spec.weights).items()}))

    averaged = partial_average(spec.weights, uploads)

    small, large = (part.coverage() for part in parts)
    for name, old in spec.weights.items():
        held_by = small[name] + large[name]
        # Held by both: mean of +1 and +2. Held by the wide one only: +2. Held by nobody: unchanged.
        moved = torch.where(held_by == 2, 1.5, torch.where(held_by == 1, 2.0, 0.0))
        torch.testing.assert_close(averaged[name], old + moved)
    assert any(bool((large[name] == 0).any()) for name in spec.weights)


def test_i13_a_sliced_client_trains_and_returns_its_local_shapes() -> None:
    spec = tiny("resnet8")
    part = WidthSlice(spec, 0.5)
    x, y = samples(spec, 8)
    program = sgd(Objective.of(part), batch=4, steps=2)
    update = run_round(program, part.extract(spec.weights), walk(x, y, 4)).update
    for name, tensor in update.items():
        assert tuple(tensor.shape) == shape_of(part.regions[name], tuple(spec.weights[name].shape))


def test_i13_models_without_narrow_siblings_and_wrong_ratios_are_refused() -> None:
    with pytest.raises(ModelError, match="narrower"):
        WidthSlice(mlp(), 0.5)
    with pytest.raises(ModelError, match=r"\(0, 1\]"):
        WidthSlice(resnet8(), 0.0)
    with pytest.raises(ModelError, match="does not lie"):
        check_region("w", ((0, 5),), (4,))
