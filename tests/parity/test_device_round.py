"""A whole round on the device runtime equals the same round in torch; all strong devices together equal FedAvg."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from device_runtime.data import Batches
from edgefl.submodels.output_side import OutputSide
from server.aggregator import Aggregator, layout_of
from tests.invariants.embracingfl import tiny
from tests.parity.rounds import exported, in_torch, local_data, on_device

BATCH, STEPS, LR = 8, 4, 0.05


@pytest.mark.parametrize(
    ("model", "cut", "chunks"),
    [
        ("mlp", 0, 1),
        ("mlp", 2, 2),
        ("cnn", 0, 1),
        ("cnn", 2, 2),
        ("resnet8", 0, 1),
        ("resnet8", 3, 2),
        ("resnet8 static", 2, 1),
    ],
)
def test_a_round_on_the_device_equals_the_round_in_torch(
    tmp_path: Path, model: str, cut: int, chunks: int
) -> None:
    tier = exported(OutputSide(tiny(model), cut, chunks), batch=BATCH, steps=STEPS, lr=LR)
    data = local_data(tier.spec, 21, seed=5)

    result, _ = on_device(tier, data, 11, tmp_path)

    expected = in_torch(tier, data, 11)
    assert result.update.keys() == expected.keys() == set(tier.submodel.holds)
    for name, value in expected.items():
        scale = max(1e-3, float(value.abs().max()))
        assert np.abs(result.update[name] - value.numpy()).max() <= 1e-4 * scale, name


@pytest.mark.parametrize("cut", [0, 2, 3])
def test_i11_every_tier_downloads_the_whole_model_and_uploads_what_it_trains(
    tmp_path: Path, cut: int
) -> None:
    tier = exported(OutputSide(tiny("resnet8"), cut, min(cut, 2)), batch=BATCH, steps=1, lr=LR)

    result, residency = on_device(tier, local_data(tier.spec, 9, 5), 11, tmp_path)

    assert residency.elements == sum(tensor.numel() for tensor in tier.spec.weights.values())
    assert sum(array.size for array in result.update.values()) == tier.bundle.manifest.parameters
    assert len(residency.downloads) == len(tier.submodel.groups) + 1


def test_i10_the_prefix_is_gone_before_the_suffix_comes(tmp_path: Path) -> None:
    tier = exported(OutputSide(tiny("resnet8"), 3, 2), batch=BATCH, steps=1, lr=LR)

    _, residency = on_device(tier, local_data(tier.spec, 9, 5), 11, tmp_path)

    parts = [*(len(group) for group in tier.submodel.groups), len(tier.spec.units) - 3]
    assert residency.most == max(parts)


def test_i7_a_strong_device_keeps_no_record(tmp_path: Path) -> None:
    tier = exported(OutputSide(tiny("mlp"), 0), batch=BATCH, steps=1, lr=LR)

    on_device(tier, local_data(tier.spec, 9, 5), 11, tmp_path)

    assert not tier.bundle.manifest.prefix
    assert list(tmp_path.iterdir()) == []


def test_i7_all_strong_one_round_equals_fedavg_by_hand(tmp_path: Path) -> None:
    tier = exported(OutputSide(tiny("resnet8"), 0), batch=BATCH, steps=STEPS, lr=LR)
    old = {name: tensor.numpy() for name, tensor in tier.spec.weights.items()}
    clients = [(local_data(tier.spec, 20 + number, number), 100 + number) for number in range(3)]
    aggregator = Aggregator(layout_of(old), weight_limit=3, device="cpu")

    for data, seed in clients:
        result, _ = on_device(tier, data, seed, tmp_path)
        aggregator.add(aggregator.check(result.update, tier.submodel.regions), weight=1)
    new = aggregator.result(old)

    by_hand = [_train_by_hand(tier.spec.module, data, seed) for data, seed in clients]
    for name in old:
        mean = sum(local[name].double() for local in by_hand) / len(by_hand)
        assert np.abs(new[name] - mean.numpy()).max() <= 1e-6, name


def _train_by_hand(module: torch.nn.Module, data: object, seed: int) -> dict[str, torch.Tensor]:
    """FedAvg's local training with torch's own optimizer, in float64; decay on kernels only."""
    import copy

    local = copy.deepcopy(module).double().train()
    kernels = [p for p in local.parameters() if p.dim() > 1]
    others = [p for p in local.parameters() if p.dim() == 1]
    groups = [{"params": kernels, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=0.9)
    batches = Batches(seed, len(data), BATCH)  # type: ignore[arg-type]
    for step in range(STEPS):
        rows = batches.indices(0, step)
        x, y = torch.from_numpy(data.x[rows]).double(), torch.from_numpy(data.y[rows])  # type: ignore[attr-defined]
        optimizer.zero_grad()
        cross_entropy(local(x), y).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in local.state_dict().items()}
