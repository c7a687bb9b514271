"""EmbracingFL's invariants on exported artifacts: bundles run by the device runtime, averaged by the server."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from edgefl.errors import StaleRecordError
from edgefl.models.zoo.basic import mlp
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_device.data.samples import Batches, LocalData
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_device.round.control import RoundControl
from edgefl_device.round.forward import MultiStepForward, record_tag
from edgefl_device.round.graph_loader import GraphLoader, RoundProfiler
from edgefl_device.round.record import Record
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from tests.invariants.embracingfl.tiny import tiny
from tests.parity.rounds import Exported, exported, local_data, on_device, published
from tests.rings.rows import mostly_slow

BATCH, STEPS, LR = 8, 4, 0.05


@cache
def tier_of(model: str, cut: int, chunks: int, steps: int = 1) -> Exported:
    """A tier of a small model, exported once."""
    spec = mlp(size=6, hidden=(9, 7, 6, 8), seed=1) if model == "mlp" else tiny(model)
    return exported(OutputSide(spec, cut, chunks), batch=BATCH, steps=steps, lr=LR)


@pytest.mark.parametrize(
    ("model", "chunks"),
    mostly_slow([("mlp", 2), ("resnet8", 1), ("resnet8", 2), ("resnet8", 3)], [("mlp", 2)]),
)
def test_i1_the_record_on_disk_is_the_one_shot_forward(tmp_path: Path, model: str, chunks: int) -> None:
    tier = tier_of(model, 3, chunks)
    manifest, data = tier.bundle.manifest, local_data(tier.spec, 21, 5)
    job, blobs = published(tier.bundle, tier.contents, seed=1)
    loader = GraphLoader(OnnxEngine(), manifest, blobs, RoundProfiler())

    forward = MultiStepForward(loader, None, tmp_path)
    with forward.record(job, data.fitted(manifest.data), RoundControl()) as record:
        rows = record.rows(np.arange(21), record_tag(job))

    with torch.no_grad():
        whole = tier.spec.part(0, 3).eval()(torch.from_numpy(data.x))
    assert np.abs(rows - whole.numpy()).max() <= 1e-5


def test_i20_a_record_of_the_last_round_is_refused_in_the_next(tmp_path: Path) -> None:
    record = Record.create(tmp_path / "record-0.bin", (3, 2), "float32", "round 1")
    record.write(0, np.ones((3, 2), np.float32))
    record.seal()

    assert record.rows(np.array([0]), "round 1").shape == (1, 2)
    with pytest.raises(StaleRecordError, match="round 2"):
        record.rows(np.array([0]), "round 2")


@pytest.mark.parametrize(
    ("model", "cut"), mostly_slow([("mlp", 3), ("resnet8", 0), ("resnet8", 2), ("resnet8", 3)], [("mlp", 3)])
)
def test_i11_every_tier_downloads_all_and_uploads_its_suffix(tmp_path: Path, model: str, cut: int) -> None:
    tier = tier_of(model, cut, min(cut, 2))

    result, residency = on_device(tier, local_data(tier.spec, 9, 5), 11, tmp_path)

    assert residency.elements == sum(tensor.numel() for tensor in tier.spec.weights.values())
    assert sum(array.size for array in result.update.values()) == tier.bundle.manifest.parameters
    assert len(residency.downloads) == len(tier.submodel.groups) + 1


def test_i10_the_prefix_is_gone_before_the_suffix_comes(tmp_path: Path) -> None:
    tier = tier_of("mlp", 3, 2)

    _, residency = on_device(tier, local_data(tier.spec, 9, 5), 11, tmp_path)

    parts = [*(len(group) for group in tier.submodel.groups), len(tier.spec.units) - 3]
    assert residency.most == max(parts)


def test_i7_a_strong_device_keeps_no_record(tmp_path: Path) -> None:
    tier = tier_of("mlp", 0, 1, STEPS)

    on_device(tier, local_data(tier.spec, 9, 5), 11, tmp_path)

    assert not tier.bundle.manifest.prefix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", mostly_slow(["mlp", "cnn", "resnet8"], ["mlp"]))
def test_i7_all_strong_one_round_equals_fedavg_by_hand(tmp_path: Path, model: str) -> None:
    tier = tier_of(model, 0, 1, STEPS)
    old = {name: tensor.numpy() for name, tensor in tier.spec.weights.items()}
    clients = [(local_data(tier.spec, 20 + number, number), 100 + number) for number in range(3)]
    aggregator = Aggregator(layout_of(old), weight_limit=3, device="cpu")

    for data, seed in clients:
        result, _ = on_device(tier, data, seed, tmp_path)
        aggregator.add(aggregator.check(result.update, tier.submodel.place({}, 1).regions), weight=1)
    new = aggregator.result(old)

    by_hand = [_train_by_hand(tier.spec.module, data, seed) for data, seed in clients]
    for name in old:
        mean = sum(local[name].double() for local in by_hand) / len(by_hand)
        assert np.abs(new[name] - mean.numpy()).max() <= 1e-6, name


def _train_by_hand(module: torch.nn.Module, data: LocalData, seed: int) -> dict[str, torch.Tensor]:
    """FedAvg's local training with torch's own optimizer, in float64; decay on kernels only."""
    local = copy.deepcopy(module).double().train()
    kernels = [p for p in local.parameters() if p.dim() > 1]
    others = [p for p in local.parameters() if p.dim() == 1]
    groups = [{"params": kernels, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=0.9)
    batches = Batches(seed, len(data), BATCH)
    for step in range(STEPS):
        rows = batches.indices(0, step)
        x, y = torch.from_numpy(data.x[rows]).double(), torch.from_numpy(data.y[rows])
        optimizer.zero_grad()
        cross_entropy(local(x), y).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in local.state_dict().items()}
