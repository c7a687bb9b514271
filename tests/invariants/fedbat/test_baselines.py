"""FedBAT invariants 24-26 (fedbat.md 7): the methods it is compared with, through the functions that devices run.

The partitions of the data, which all methods share, are in ``test_partition.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from edgefl.codecs.binarize import draw
from edgefl.codecs.codec import Change, Coder
from edgefl.codecs.coders import (
    FixedSign,
    NearestLevels,
    NoisySign,
    ScaledSignCoder,
    StochasticLevels,
    StochasticSign,
)
from edgefl.codecs.packing import top_k
from edgefl.contract.tensors import Tensors
from edgefl.wire.update.form import CodeEncoding, SparseEncoding
from tests.codecs.coding import Coding, difference
from tests.invariants.fedbat.tiny import Feed, drawing
from tests.support.reference import RoundResult, run_round

DRAWS = 40_000


def told(coder: Coder, value: Tensor, uniform: Tensor | None = None) -> Tensor:
    """mhat: what the server reads out of the codes of ``value``."""
    encoding = coder.encoding
    assert isinstance(encoding, CodeEncoding)
    coded = coder.code(Change(value, torch.zeros_like(value), uniform=uniform))
    scale = torch.tensor(encoding.scale) if coded.scale is None else coded.scale
    return scale * torch.tensor(encoding.levels)[coded.codes.to(torch.int64)]


def many(coder: Coder, value: Tensor, seed: int) -> Tensor:
    """float64 (DRAWS, entries): mhat of the same change under as many draws."""
    generator = torch.Generator().manual_seed(seed)
    rows = value.repeat(DRAWS, 1)
    return told(coder, rows, torch.rand(rows.shape, generator=generator)).to(torch.float64)


def within_five_sigma(found: Tensor, mean: Tensor, most: float) -> None:
    """Whether the mean of draws no larger than ``most`` is ``mean``, entry by entry."""
    deviation = found.var(dim=0).sqrt() + most / math.sqrt(DRAWS)
    assert torch.all((found.mean(dim=0) - mean).abs() <= 5 * deviation / math.sqrt(DRAWS))


# -- 24: SignSGD and EF-SignSGD --------------------------------------------------------------------------------


def test_i24_signsgd_moves_no_weight_further_than_alpha() -> None:
    coding = Coding.of("signsgd", alpha=0.003)
    updates = [(coding.finish(coding.moved(seed), seed=seed)[0], 10 * seed + 1) for seed in range(5)]

    new = coding.averaged(*updates)

    for name in coding.objective.trainable:
        moved = np.abs(difference(new, coding.arrays, name))
        assert np.all(moved <= 0.003 + np.spacing(np.abs(coding.arrays[name]) + np.float32(0.003))), name
    alone = coding.averaged(updates[0])
    for name in coding.objective.trainable:
        expected = coding.arrays[name].astype(np.float64) + coding.decoded(updates[0][0])[name]
        assert np.array_equal(alone[name], expected.astype(np.float32)), "and one client by exactly alpha"


def test_i24_signsgd_sends_nothing_but_bits_of_what_is_trained() -> None:
    coding = Coding.of("signsgd", statistics=32)

    update, kept = coding.finish(coding.moved(seed=1))

    assert sorted(update) == ["codes", "values"] and not kept
    assert update["codes"].size == sum(
        math.ceil(math.prod(coding.shapes[name]) / 8) for name in coding.objective.trainable
    )


Round = tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]


def feedback_rounds(codec: str, rounds: int, **options: object) -> Iterator[Round]:
    """(u, mhat, e before, e after) of some rounds, in each of which training moved the weights by something else."""
    coding = Coding.of(codec, **options)
    carry: dict[str, Tensor] | None = None
    for seed in range(rounds):
        left = coding.with_zeros(coding.moved(seed))
        update, after = coding.finish(left, seed=seed, carry=carry)
        names = coding.objective.trainable
        before = {
            name: (carry or {}).get(f"carry.residual.{name}", torch.zeros_like(left[name])).numpy()
            for name in names
        }
        u = {name: (left[name] - coding.weights[name]).numpy() + before[name] for name in names}
        mhat = coding.decoded(update)
        yield u, {n: mhat[n] for n in names}, before, {n: after[f"carry.residual.{n}"].numpy() for n in names}
        assert set(after) == {f"carry.residual.{name}" for name in names}
        carry = after


def test_i24_residual_is_what_the_update_does_not_say() -> None:
    """u = mhat + e_new: e_new is u - mhat rounded once to float32, and not rounded at all where |u| is 1/2 to 2 alpha."""
    exact, carried = 0, False
    for u, mhat, before, after in feedback_rounds("ef_signsgd", 4):
        carried |= any(array.any() for array in before.values())
        for name, value in u.items():
            assert after[name].tobytes() == (value - mhat[name]).tobytes(), name
            near = (np.abs(value) >= np.abs(mhat[name]) / 2) & (np.abs(value) <= 2 * np.abs(mhat[name]))
            near &= np.sign(value) == np.sign(mhat[name])
            assert np.array_equal((mhat[name] + after[name])[near], value[near])
            exact += int(near.sum())
            error = np.abs(mhat[name].astype(np.float64) + after[name] - value)
            assert np.all(error <= np.spacing(np.abs(after[name])) / 2)
    assert exact > 100 and carried


def test_i24_ef_step_size_is_the_mean_size_of_what_is_compensated() -> None:
    for u, mhat, _, _ in feedback_rounds("ef_signsgd", 4):
        for name, value in u.items():
            alpha = np.unique(np.abs(mhat[name]))
            assert alpha.size == 1
            np.testing.assert_allclose(alpha[0], np.abs(value.astype(np.float64)).mean(), rtol=1e-6)


def test_i24_ef_contracts() -> None:
    for u, mhat, _, _ in feedback_rounds("ef_signsgd", 4):
        for name, value in u.items():
            x, y = value.astype(np.float64), mhat[name].astype(np.float64)
            left, alpha, d = ((x - y) ** 2).sum(), np.abs(y).mean(), x.size
            squares, sizes = (x**2).sum(), np.abs(x).sum()
            np.testing.assert_allclose(left, squares - d * alpha**2, rtol=1e-4, atol=1e-6 * squares)
            np.testing.assert_allclose(
                left, (1 - sizes**2 / (d * squares)) * squares, rtol=1e-4, atol=1e-6 * squares
            )
            assert left < squares


@pytest.mark.parametrize(("codec", "options"), [("topk", {"feedback": True}), ("int8", {"feedback": True})])
def test_feedback_keeps_what_updates_do_not_say(codec: str, options: dict[str, bool]) -> None:
    for u, mhat, _, after in feedback_rounds(codec, 3, **options):
        for name, value in u.items():
            np.testing.assert_allclose(mhat[name] + after[name], value, rtol=1e-6, atol=1e-9)


def test_i24_over_rounds_what_was_sent_and_what_is_left_are_all_changes() -> None:
    sent, changes, last = {}, {}, {}
    for u, mhat, before, after in feedback_rounds("ef_signsgd", 6):
        for name, value in u.items():
            sent[name] = sent.get(name, 0) + mhat[name].astype(np.float64)
            changes[name] = changes.get(name, 0) + (value.astype(np.float64) - before[name])
            last[name] = after[name]
    for name, total in changes.items():
        np.testing.assert_allclose(sent[name] + last[name], total, atol=1e-6)


def test_i24_residual_of_a_client_that_rests_is_applied_as_it_was() -> None:
    coding = Coding.of("ef_signsgd")
    algorithm, weights = coding.algorithm, coding.weights

    def round_of(seed: int, carry: Tensors, weights: Tensors) -> RoundResult:
        feed = Feed.of(coding.submodel.spec, seed=seed, samples=16)
        return run_round(drawing(algorithm, seed), weights, feed, carry=carry)

    first = round_of(1, {}, weights)
    before = {name: tensor.clone() for name, tensor in first.carry.items()}
    moved = {name: tensor + 0.01 for name, tensor in weights.items()}
    other = round_of(2, {}, moved)  # this client is not sampled, another one is, and the model moves on
    again = round_of(3, first.carry, moved)

    assert all(torch.equal(first.carry[name], before[name]) for name in before)
    assert any(not torch.equal(other.carry[name], before[name]) for name in before)
    fresh = round_of(3, {}, moved)
    for name in coding.objective.trainable:
        u = {
            key: result.carry[f"residual.{name}"].numpy().astype(np.float64)
            + coding.decoded({n: t.numpy() for n, t in result.update.items()})[name]
            for key, result in (("again", again), ("fresh", fresh))
        }
        residual = before[f"residual.{name}"].numpy()
        np.testing.assert_allclose(u["again"] - u["fresh"], residual, rtol=1e-4, atol=1e-7)
        assert residual.any()


# -- 25: noise before the sign ---------------------------------------------------------------------------------


def test_i25_mean_of_noisy_signs_is_an_error_function() -> None:
    alpha, sigma = 0.01, 0.02
    m = torch.tensor([0.0, 0.001, -0.004, 0.01, -0.02, 0.05, -0.2])

    found = many(NoisySign(alpha, sigma), m, seed=1)

    mean = alpha * torch.erf(m.to(torch.float64) / (sigma * math.sqrt(2)))
    assert torch.all(found.abs() == float(np.float32(alpha)))
    within_five_sigma(found, mean, alpha)
    slope = alpha / sigma * math.sqrt(2 / math.pi) * 0.001
    assert float(mean[1]) == pytest.approx(slope, rel=0.01), "0.798 alpha / sigma for small m"


def test_i25_mean_of_stochastic_signs_is_alpha_times_the_share() -> None:
    m = torch.tensor([0.0, 0.001, -0.004, 0.01, -0.02, 0.05, -0.1])

    found = many(StochasticSign(alpha=0.01), m, seed=2)

    within_five_sigma(found, 0.01 * m.to(torch.float64) / 0.1, 0.01)
    assert torch.all(found[:, -1] < 0), "the largest is certain"


def test_i25_stochastic_sign_can_be_the_operator_of_fedbat() -> None:
    generator = torch.Generator().manual_seed(3)
    m = torch.randn(5_000, generator=generator)
    zeta = torch.rand(5_000, generator=generator)
    largest = m.abs().max()

    found = told(StochasticSign(alpha=float(largest)), m, zeta)

    operator = largest * draw(m, largest, zeta)
    # (A + m) / (2 A) and 1/2 + m / (2 A) differ in the last bit, which one draw in a million decides.
    assert int((found != operator).sum()) <= 1
    within_five_sigma(
        many(StochasticSign(alpha=float(largest)), m[:6].clone().put_(torch.tensor(5), largest), 4),
        m[:6].to(torch.float64).put_(torch.tensor(5), largest.double()),
        float(largest),
    )


# -- 26 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_i26_fedpaq_is_unbiased_with_a_bounded_spread(bits: int) -> None:
    m = torch.tensor([0.0, 0.0003, -0.0041, 0.01, -0.0234, 0.05, -0.1])
    step = 0.1 / (2 ** (bits - 1) - 1)

    found = many(StochasticLevels(bits), m, seed=bits)

    within_five_sigma(found, m.to(torch.float64), step)
    assert torch.all(found.var(dim=0) <= step**2 / 4 * 1.05), "A^2 / (4 q^2)"
    assert torch.all(found[:, 0] == 0) and torch.all(found[:, -1] == found[0, -1])


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_i26_fedpaq_has_at_most_two_to_the_b_codes(bits: int) -> None:
    generator = torch.Generator().manual_seed(5)
    m, zeta = 2 * torch.rand(50_000, generator=generator) - 1, torch.rand(50_000, generator=generator)
    for coder in (StochasticLevels(bits), NearestLevels(bits)):
        codes = coder.code(Change(m, torch.zeros_like(m), uniform=zeta)).codes
        assert torch.equal(codes, codes.round()) and codes.min() >= 0 and codes.max() <= 2**bits - 2
        assert len(told(coder, m, zeta).unique()) == 2**bits - 1, "and all of them occur"
        assert len(coder.encoding.levels) == 2**bits
        levels = (0.5 if isinstance(coder, NearestLevels) else 1.0) / (2 ** (bits - 1) - 1)
        assert torch.all((told(coder, m, zeta) - m).abs() <= m.abs().max() * (levels + 1e-6))


@given(entries=st.integers(1, 400), seed=st.integers(0, 2**32 - 1))
def test_i26_zerofl_keeps_the_largest_entries_and_exactly_three_percent(entries: int, seed: int) -> None:
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=entries).astype(np.float32))
    kept = top_k(x, SparseEncoding(1 - 0.97).kept(entries))

    assert kept.tolist() == sorted(set(kept.tolist()))
    assert len(kept) == -(-3 * entries // 100)
    others = x.abs().index_fill(0, kept, 0.0)
    assert others.max() <= x[kept].abs().min()


@pytest.mark.parametrize(("codec", "options"), [("zerofl", {}), ("topk", {"share": 0.03})])
def test_i26_a_sparse_update_says_three_percent(codec: str, options: dict[str, float]) -> None:
    coding = Coding.of(codec, **options)
    left = coding.moved(seed=3)

    update, _ = coding.finish(left)

    said = coding.decoded(update)
    for name in coding.objective.trainable:
        change = (left[name] - coding.weights[name]).numpy()
        kept = said[name] != 0
        assert kept.sum() == -(-3 * change.size // 100), name
        assert np.array_equal(said[name][kept], change[kept]), "as float32, to the bit"
        assert np.abs(change[kept]).min() >= np.abs(change[~kept]).max(initial=0.0)


@pytest.mark.parametrize("coder", [FixedSign(0.5), ScaledSignCoder()])
def test_i26_zero_becomes_either_sign_by_chance(coder: Coder) -> None:
    m = torch.zeros(3)
    m[1:] = torch.tensor([2.0, -2.0])
    assert coder.random

    found = many(coder, m, seed=6).sign()

    within_five_sigma(found[:, :1], torch.zeros(1), 1.0)
    assert torch.all(found[:, 1] == 1) and torch.all(found[:, 2] == -1)


@pytest.mark.parametrize("coder", [FixedSign(0.5, "plus"), ScaledSignCoder("plus")])
def test_i26_zero_becomes_plus_where_that_is_the_policy(coder: Coder) -> None:
    assert not coder.random
    assert told(coder, torch.tensor([0.0, -0.0, 1.0, -1.0])).sign().tolist() == [1, 1, 1, -1]


@pytest.mark.parametrize(("sign0", "noisy"), [("random", True), ("plus", False)])
def test_i26_policy_for_zero_decides_whether_a_device_draws(sign0: str, noisy: bool) -> None:
    coding = Coding.of("ef_signsgd", sign0=sign0)
    ports = coding.algorithm.finish.inputs
    assert any(name.startswith("noise.") for name in ports) is noisy
    first, again = (coding.finish(coding.weights, seed=seed)[0]["codes"] for seed in (1, 2))
    assert (not np.array_equal(first, again)) is noisy, "a round that changed nothing"


@pytest.mark.parametrize("codec", ["scaled_sign", "ef_signsgd", "stoc_signsgd", "fedpaq", "int8", "topk"])
def test_training_without_changes_makes_no_nan(codec: str) -> None:
    coding = Coding.of(codec)

    update, kept = coding.finish(coding.weights)

    said = coding.decoded(update)
    fixed = 0.01 if codec == "stoc_signsgd" else 0.0
    for name, array in said.items():
        expected = fixed if name in coding.objective.trainable else 0.0
        assert np.all(np.abs(array) == np.float32(expected)), name
    assert not any(tensor.any() for tensor in kept.values())
