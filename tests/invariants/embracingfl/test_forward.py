"""EmbracingFL I1, I2, I12: the multi-step forward pass (Algorithm 1)."""

from __future__ import annotations

from queue import SimpleQueue

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.algorithms.submodels.frozen_forward import chunk_forward, multi_step_forward
from edgefl.models.zoo.resnet import resnet20
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide, tiers
from tests.invariants.embracingfl.tiny import chunkings, record, samples, tiny, walk
from tests.rings.rows import mostly_slow
from tests.support.reference import run_round

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
