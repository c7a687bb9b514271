"""EmbracingFL I14: batch norm's moving statistics, kept and averaged (global) or absent (static)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.zoo.resnet import resnet20
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.invariants.embracingfl.tiny import record, samples, tiny, walk
from tests.support.reference import partial_average, run_round


def test_i14_static_mode_has_no_moving_statistics_anywhere() -> None:
    spec = tiny("resnet8 static")
    algorithm = sgd(Objective.of(OutputSide(spec, 2)), batch=4, steps=2)
    step = algorithm.phases[0].function
    names = [*spec.weights, *algorithm.start.inputs, *step.inputs, *step(step.example(0))]
    assert not [name for name in names if "running" in name or "num_batches" in name]


def test_i14_both_modes_have_the_same_trainable_parameters() -> None:
    modes = [resnet20(bn=mode) for mode in ("global", "static")]
    assert [name for name, _ in modes[0].module.named_parameters()] == list(modes[1].weights)
    assert all(torch.equal(modes[0].weights[name], modes[1].weights[name]) for name in modes[1].weights)


def test_i14_global_statistics_are_the_mean_of_their_trainers() -> None:
    spec, cuts = tiny("resnet8"), (0, 2, 3)
    updates, uploads = [], []
    for client, cut in enumerate(cuts):
        submodel = OutputSide(spec, cut)
        x, y = samples(spec, 8, seed=client)
        kept = record(submodel, x, 4) if cut else x
        updates.append(
            run_round(sgd(Objective.of(submodel), batch=4, steps=2), spec.weights, walk(kept, y, 4)).update
        )
        uploads.append((submodel.place({}, 1).regions, updates[-1]))

    averaged = partial_average(spec.weights, uploads)

    statistics = [name for name in spec.weights if "running" in name]
    assert statistics
    for name in statistics:
        trained = [update[name] for update in updates if name in update]
        assert len(trained) == sum(cut <= spec.units.index(name.partition(".")[0]) for cut in cuts)
        torch.testing.assert_close(averaged[name], torch.stack(trained).mean(0))
        assert not torch.equal(averaged[name], spec.weights[name])


@pytest.mark.parametrize("keep", [0.9, 0.99])
def test_i14_moving_statistics_follow_torch(keep: float) -> None:
    ours, theirs = BatchNorm(3, keep=keep), nn.BatchNorm2d(3, momentum=1 - keep)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(4, 3, 5, 5, generator=generator) * 2 + 1
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_i14_a_frozen_pass_leaves_the_moving_statistics_alone() -> None:
    spec = tiny("resnet8")
    before = {name: tensor.clone() for name, tensor in spec.weights.items()}
    record(OutputSide(spec, 3, 2), samples(spec, 8)[0], 4)
    assert all(torch.equal(before[name], tensor) for name, tensor in spec.weights.items())
