"""EmbracingFL I1, I2, I12: the multi-step forward pass (Algorithm 1)."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.algorithms.submodels.frozen_forward import chunk_forward, multi_step_forward
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.zoo.basic import mlp
from edgefl.models.zoo.resnet import resnet20
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide, tiers
from edgefl_device.data.samples import Batches, LocalData
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_device.round.control import RoundControl
from edgefl_device.round.forward import ActivationRecord, MultiStepForward, record_tag
from edgefl_device.round.graph_loader import GraphLoader, RoundProfiler
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from tests.invariants.embracingfl.tiny import chunkings, record, samples, tiny, walk
from tests.parity.rounds import Exported, exported, local_data, on_device, published
from tests.rings.rows import mostly_slow
from tests.support.errors import StaleRecordError, refuses
from tests.support.reference import partial_average, run_round

MODELS = ("resnet8", "resnet8 static", "cnn", "mlp", "bilstm")


@pytest.mark.parametrize("name", mostly_slow(MODELS, MODELS[1:]))
def test_i1_every_cut_and_chunking_leaves_the_same_record(name: str) -> None:
    spec = tiny(name)
    x, _ = samples(spec, 16)
    for cut in range(1, len(spec.units)):
        once = record(OutputSide(spec, cut, 1), x, 8)
        for groups in chunkings(spec.units[:cut]):
            assert torch.equal(record(OutputSide(spec, cut, groups), x, 8), once), groups


@pytest.mark.parametrize("name", ["resnet8", "cnn", "mlp", "bilstm"])
def test_i1_a_one_shot_inference_forward_gives_the_same_record(name: str) -> None:
    spec = tiny(name)
    x, _ = samples(spec, 11)
    for cut in range(1, len(spec.units)):
        with torch.no_grad():
            expected = spec.part(0, cut).eval()(x)
        torch.testing.assert_close(record(OutputSide(spec, cut, cut), x, 4), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@given(cut=st.integers(1, 9), rows=st.integers(2, 9), batch=st.integers(1, 12), data=st.data())
def test_i1_forward_batch_size_does_not_matter(cut: int, rows: int, batch: int, data: st.DataObject) -> None:
    spec = tiny("resnet20")
    x, _ = samples(spec, rows)
    chunks = data.draw(st.integers(1, cut))
    once = record(OutputSide(spec, cut, 1), x, rows)
    torch.testing.assert_close(record(OutputSide(spec, cut, chunks), x, batch), once, rtol=1e-5, atol=1e-5)


def test_i1_static_batch_norm_normalises_fixed_groups_of_rows() -> None:
    spec = tiny("resnet8 static")
    x, _ = samples(spec, 16)
    submodel = OutputSide(spec, 2, 2)
    grouped = record(submodel, x, 8)
    with torch.no_grad():
        by_hand = torch.cat([spec.part(0, 2).eval()(rows) for rows in x.split(8)])
    torch.testing.assert_close(grouped, by_hand, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(record(submodel, x, 16), grouped, atol=1e-3), "other groups, other statistics"


@pytest.mark.sample(4)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_i2_suffix_of_the_record_equals_the_full_model(name: str, training: bool) -> None:
    spec = tiny(name)
    x, _ = samples(spec, 8)
    for cut in range(1, len(spec.units)):
        submodel = OutputSide(spec, cut, 1)
        full = nn.Sequential(spec.part(0, cut).eval(), spec.part(cut, len(spec.units)).train(training))
        with torch.no_grad():
            expected = full(x)
            actual = submodel.suffix.train(training)(record(submodel, x, 8))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_i2_evaluation_of_the_record_equals_evaluation_of_the_raw_rows(name: str) -> None:
    spec = tiny(name)
    x, y = samples(spec, 8)
    expected = spec.loss.each(Objective(spec.module, spec.sample, spec.loss).predict(spec.weights, x), y)
    for tier in ("moderate", "weak") if name != "mlp" else ():
        submodel = tiers(spec.name)[tier].of(spec)
        losses = spec.loss.each(Objective.of(submodel).predict(spec.weights, record(submodel, x, 8)), y)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 5])
def test_i12_each_prefix_unit_sees_each_row_once(steps: int) -> None:
    spec = tiny("resnet20")
    # A queue, because what a hook keeps in containers and arrays is restored after each run.
    seen: SimpleQueue[tuple[int, int]] = SimpleQueue()
    for number, name in enumerate(spec.units):
        spec.module.get_submodule(name).register_forward_hook(_count_rows(seen, number))
    submodel = tiers("resnet20")["weak"].of(spec)
    chunks = [chunk_forward(chunk.module, chunk.sample, batch=8) for chunk in submodel.prefix]
    algorithm = sgd(Objective.of(submodel), batch=4, steps=steps)
    x, y = samples(spec, 24)
    _rows(seen, len(spec.units))

    kept = multi_step_forward(chunks, spec.weights, x)
    run_round(algorithm, spec.weights, walk(kept, y, 4))

    assert _rows(seen, len(spec.units)) == [24] * 7 + [4 * steps] * 4


def _count_rows(seen: SimpleQueue[tuple[int, int]], number: int):  # type: ignore[no-untyped-def]
    def hook(_unit: nn.Module, args: tuple[Tensor], _out: Tensor) -> None:
        seen.put((number, len(args[0])))

    return hook


def _rows(seen: SimpleQueue[tuple[int, int]], units: int) -> list[int]:
    """Return the rows that went through each unit since the last call."""
    rows = [0] * units
    while not seen.empty():
        number, count = seen.get()
        rows[number] += count
    return rows


def test_i1_the_paper_s_chunks_of_the_weak_tier() -> None:
    weak = tiers("resnet20")["weak"].of(resnet20())
    sizes = [sum(p.numel() for p in chunk.module.parameters()) for chunk in weak.prefix]
    assert sizes == [14_768, 51_648]


# -- EmbracingFL's invariants on exported artifacts ------------------------------------------------------------


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
    record = ActivationRecord.create(tmp_path / "record-0.bin", (3, 2), "float32", "round 1")
    record.write(0, np.ones((3, 2), np.float32))
    record.seal()

    assert record.rows(np.array([0]), "round 1").shape == (1, 2)
    with refuses(StaleRecordError, recorded="round 1", wanted="round 2"):
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


# -- EmbracingFL I14: batch norm's moving statistics, kept and averaged (global) or absent (static) --------


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
