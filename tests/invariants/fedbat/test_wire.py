"""FedBAT invariants 20-23 (fedbat.md 7): what an update weighs, and what the server's sum makes of bits and step sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgefl.codecs.packing import pack_codes
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.decode import unpack_codes
from edgefl.wire.update.form import SIGNS, CodeEncoding, FloatEncoding, Form, Section
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from tests.codecs.coding import Coding, small

PAPER = [
    ("fedbat_cnn", {"in_channels": 1, "size": 28}, 390_890, 14, 48_918, 3_840),
    ("fedbat_cnn", {"in_channels": 3, "size": 32}, 399_146, 14, 49_950, 3_840),
    ("resnet10", {"classes": 10}, 1_228_970, 38, 153_774, 11_520),
    ("resnet10", {"classes": 100}, 1_252_100, 38, 156_665, 11_520),
]


def paper_model(name: str, options: dict[str, int]) -> ModelSpec:
    return build_model(name, **options)


# -- 20: the bytes ---------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("codec", ["scaled_sign", "ef_signsgd", "fedbat"])
@pytest.mark.parametrize(("model", "options", "entries", "tensors", "payload", "buffers"), PAPER)
def test_i20_payload_of_the_paper_s_models_is_that_of_its_table(
    codec: str, model: str, options: dict[str, int], entries: int, tensors: int, payload: int, buffers: int
) -> None:
    coding = Coding.of(codec, paper_model(model, options), statistics=32)
    trained = coding.algorithm.form.sections[0]
    sizes = {name: math.prod(coding.shapes[name]) for name in coding.regions}

    assert (sum(sizes[name] for name in trained.names), len(trained.names)) == (entries, tensors)
    lengths = {name: length for name, (_, length) in coding.algorithm.form.arrays(sizes).items()}
    assert lengths == {"codes": payload - 4 * tensors, "scales": tensors, "values": buffers // 4}
    assert payload == sum(math.ceil(sizes[name] / 8) + 4 for name in trained.names)
    assert 31.9 < 4 * entries / payload < 32


@pytest.mark.parametrize(
    ("model", "options", "entries", "tensors", "payload", "buffers"), [PAPER[0], PAPER[2]]
)
def test_i20_finish_gives_as_many_bytes_as_the_table_says(
    model: str, options: dict[str, int], entries: int, tensors: int, payload: int, buffers: int
) -> None:
    coding = Coding.of("scaled_sign", paper_model(model, options), statistics=32)

    update, _ = coding.finish(coding.moved(seed=1))

    assert update["codes"].nbytes + update["scales"].nbytes == payload
    assert update["values"].nbytes == buffers


@pytest.mark.parametrize(("model", "options"), [(row[0], row[1]) for row in PAPER])
def test_i20_statistics_leave_it_28_times_smaller(model: str, options: dict[str, int]) -> None:
    coding = Coding.of("scaled_sign", paper_model(model, options))
    sizes = {name: math.prod(coding.shapes[name]) for name in coding.regions}

    told = coding.algorithm.form.arrays(sizes).values()
    coded = sum(np.dtype(dtype).itemsize * length for dtype, length in told)

    assert 28 < 4 * sum(sizes.values()) / coded < 32


@given(
    bits=st.integers(1, 8),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_i20_codes_packed_by_the_device_are_read_back(bits: int, lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, 2**bits, length).astype(np.float32) for length in lengths]

    packed = pack_codes([torch.from_numpy(part) for part in parts], bits).numpy()

    assert packed.dtype == np.uint8 and packed.size == sum(math.ceil(bits * n / 8) for n in lengths)
    start = 0
    for part in parts:
        size = math.ceil(bits * part.size / 8)
        assert unpack_codes(packed[start : start + size], bits, part.size).tolist() == part.tolist()
        start += size


def test_i20_unpacked_signs_and_scales_are_the_changes() -> None:
    coding = Coding.of("scaled_sign")
    left = coding.moved(seed=2)

    told = coding.decoded(coding.finish(left)[0])

    for name in coding.objective.trainable:
        change = (left[name] - coding.weights[name]).numpy()
        assert np.array_equal(np.sign(told[name]), np.sign(change)), name
        np.testing.assert_allclose(np.abs(told[name]), np.abs(change).mean(), rtol=1e-6)


# -- 21: shares of the clients ---------------------------------------------------------------------------------

ONE_BIT = Form("bits", sections=(Section(("w",), CodeEncoding(1, SIGNS), {"w": 0}),), change=True)
FLOATS = Form("floats", sections=(Section(("w",), FloatEncoding()),), change=True)
REGIONS = {"w": None}


def signed(signs: np.ndarray, alpha: float) -> Arrays:
    packed = np.packbits(signs > 0, bitorder="little")
    return {"codes": packed, "scales": np.array([alpha], np.float32)}


def new_weights(
    old: np.ndarray, updates: list[tuple[Form, Arrays, int]], limit: int | None = None
) -> np.ndarray:
    aggregator = Aggregator(
        layout_of({"w": old}), weight_limit=limit or sum(count for _, _, count in updates), device="cpu"
    )
    for form, arrays, count in updates:
        aggregator.add(aggregator.check(arrays, REGIONS, form), count)
    return aggregator.result({"w": old})["w"]


def test_i21_golden_clients_move_a_weight_by_an_eighth() -> None:
    few, many = signed(np.ones(9), 0.1), signed(-np.ones(9), 0.2)

    new = new_weights(np.zeros(9, np.float32), [(ONE_BIT, few, 100), (ONE_BIT, many, 300)])

    # The step sizes themselves are float32: .25 * .1 - .75 * .2, rounded once, at the end.
    exact = (100 * float(np.float32(0.1)) - 300 * float(np.float32(0.2))) / 400
    assert new.tolist() == [np.float32(exact)] * 9
    assert abs(exact + 0.125) < 1e-8


@given(
    counts=st.lists(st.integers(1, 2_000), min_size=1, max_size=8), alpha=st.floats(2.0**-8, 4.0, width=32)
)
def test_i21_shares_of_the_clients_add_up_to_one(counts: list[int], alpha: float) -> None:
    signs = np.where(np.arange(11) % 3 == 0, 1.0, -1.0)
    updates = [(ONE_BIT, signed(signs, alpha), count) for count in counts]

    new = new_weights(np.zeros(11, np.float32), updates)

    # Fixed point errs by less than 2**-42 per client whatever the samples: too little to make it another float32.
    assert np.array_equal(new, (np.float32(alpha) * signs).astype(np.float32))


# -- 22: how far a weight moves --------------------------------------------------------------------------------


def test_i22_no_weight_moves_further_than_the_mean_step_size() -> None:
    rng = np.random.default_rng(4)
    old = rng.normal(size=999).astype(np.float32)
    counts, alphas = rng.integers(1, 500, 7), rng.uniform(1e-4, 0.1, 7).astype(np.float32)
    signs = rng.choice([-1.0, 1.0], (7, 999))
    signs[:, 0] = 1  # all agree here, so the bound is reached

    new = new_weights(
        old, [(ONE_BIT, signed(s, a), int(n)) for s, a, n in zip(signs, alphas, counts, strict=True)]
    )

    moved = np.abs(new.astype(np.float64) - old)
    bound = float(counts @ alphas.astype(np.float64) / counts.sum())
    rounding = (
        np.spacing(np.abs(old) + np.float32(bound)) / 2 + 2.0**-30
    )  # of the sum to float32, and fixed point
    assert np.all(moved <= bound + rounding)
    assert moved[0] == pytest.approx(bound, abs=float(rounding[0])) and moved[1:].min() < bound / 2


@pytest.mark.parametrize("alpha", [3e-5, 0.001, 0.0123, 1.0])
@pytest.mark.parametrize("samples", [1, 10, 60_000])
def test_i22_one_client_moves_every_weight_by_its_step_size_exactly(alpha: float, samples: int) -> None:
    rng = np.random.default_rng(5)
    signs = rng.choice([-1.0, 1.0], 333)
    size = np.float64(np.float32(alpha))

    from_zero = new_weights(np.zeros(333, np.float32), [(ONE_BIT, signed(signs, alpha), samples)])

    # Fixed point is off by half a unit at most, shared by all samples: too little to make it another float32.
    unit = 2.0 ** -(42 - (samples - 1).bit_length())
    assert unit / samples < np.spacing(np.float32(alpha))
    assert np.array_equal(from_zero, (size * signs).astype(np.float32))
    # The one rounding left is that of old + alpha to float32.
    old = rng.normal(size=333).astype(np.float32)
    moved = new_weights(old, [(ONE_BIT, signed(signs, alpha), samples)]).astype(np.float64) - old
    assert np.all(
        np.abs(moved - size * signs) <= np.spacing(np.abs(old) + np.float32(alpha)) / 2 + unit / samples
    )


def test_i22_one_client_moves_every_trained_weight_by_alpha() -> None:
    coding = Coding.of("scaled_sign")
    update, _ = coding.finish(coding.moved(seed=6))

    new = coding.averaged((update, 1))

    groups = coding.algorithm.form.sections[0].groups
    for name in coding.objective.trainable:
        alpha = update["scales"][groups[name]]
        before = coding.arrays[name].astype(np.float64)
        told = coding.decoded(update)[name]
        assert np.all(np.abs(told) == alpha)
        assert np.array_equal(new[name], (before + told).astype(np.float32))


def test_i22_spread_of_identical_clients_falls_with_their_number() -> None:
    alpha, m, entries = 0.5, 0.2, 20_000
    rng = np.random.default_rng(7)
    old = np.zeros(entries, np.float32)
    for clients in (1, 4, 16):
        updates = []
        for _ in range(clients):
            signs = np.where(rng.random(entries) < (alpha + m) / (2 * alpha), 1.0, -1.0)
            updates.append((ONE_BIT, signed(signs, alpha), 1))
        new = new_weights(old, updates).astype(np.float64)
        expected = (alpha**2 - m**2) / clients
        # Five deviations of the estimates, those of a normal law, which is the widest of the three.
        assert abs(new.var() / expected - 1) < 5 * math.sqrt(2 / entries)
        assert abs(new.mean() - m) < 5 * math.sqrt(expected / entries)


# -- 23: full precision through the same path ------------------------------------------------------------------


def test_i23_uploads_in_full_precision_give_federated_averaging() -> None:
    rng = np.random.default_rng(8)
    old = rng.normal(size=500).astype(np.float32)
    counts = [100, 300, 57]
    changes = [rng.normal(0, 0.02, 500).astype(np.float32) for _ in counts]

    new = new_weights(
        old, [(FLOATS, {"values": m}, n) for m, n in zip(changes, counts, strict=True)], limit=1024
    )

    mean = sum(n * m.astype(np.float64) for m, n in zip(changes, counts, strict=True)) / sum(counts)
    assert np.abs(new - (old + mean)).max() <= 2.0**-24 * np.abs(new).max() + 2.0**-32
    dense = [
        (Form(), {"w": (old.astype(np.float64) + m).astype(np.float32)}, n)
        for m, n in zip(changes, counts, strict=True)
    ]
    np.testing.assert_allclose(new, new_weights(old, dense, limit=1024), atol=1e-6)


def test_i23_bits_and_floats_of_one_round_are_averaged_together() -> None:
    signs = np.where(np.arange(20) % 2, 1.0, -1.0)
    values = np.linspace(-1, 1, 20, dtype=np.float32)

    new = new_weights(
        np.zeros(20, np.float32), [(ONE_BIT, signed(signs, 0.5), 1), (FLOATS, {"values": values}, 3)]
    )

    assert np.array_equal(new, ((0.5 * signs + 3 * values.astype(np.float64)) / 4).astype(np.float32))


def test_i23_sum_of_bits_is_that_of_the_same_changes_in_full_precision() -> None:
    rng = np.random.default_rng(9)
    old = rng.normal(size=77).astype(np.float32)
    bits, floats = [], []
    for count in (3, 11, 5):
        signs, alpha = rng.choice([-1.0, 1.0], 77), np.float32(rng.uniform(0.001, 0.1))
        bits.append((ONE_BIT, signed(signs, alpha), count))
        floats.append((FLOATS, {"values": (alpha * signs).astype(np.float32)}, count))

    assert new_weights(old, bits).tobytes() == new_weights(old, floats[::-1]).tobytes()


def test_small_model_of_these_tests_has_no_tensor_of_whole_bytes_only() -> None:
    assert any(math.prod(tensor.shape) % 8 for tensor in small().weights.values())
