"""Patches: the same bits on both sides, errors that are fed back, and nothing believed."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.errors import BundleError
from edgefl.wire import tensors
from edgefl.wire.patches import SCALES, apply_patch, make_patch, to_float16, to_float32
from edgefl.wire.tensors import Array, Arrays

CODED = {"u.w", "u.b", "u.s"}


def model(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = {"u.w": (20, 30), "u.b": (5,), "u.s": (), "u.mean": (5,), "u.none": (0, 3)}
    return {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in shapes.items()}


def test_codes_are_the_nearest_of_255_levels() -> None:
    new = np.array([0.0, 127.0, -127.0, 63.4, -63.6, 0.4], np.float32)
    found = tensors.load(make_patch({"u.w": np.zeros(6, np.float32)}, {"u.w": new}, CODED) or b"")

    assert found["u.w"].tolist() == [0, 127, -127, 63, -64, 0] and found["u.w"].dtype == np.int8
    assert found[SCALES].tolist() == [127.0]


def test_a_patch_moves_every_entry_to_within_half_a_level() -> None:
    old, new = model(0), model(1)
    r = apply_patch(old, make_patch(old, new, CODED) or b"")

    for name in CODED:
        largest = np.abs(new[name] - old[name]).max()
        assert np.abs(r[name] - new[name]).max() <= largest / 254 * 1.001
        assert r[name].shape == new[name].shape and r[name].dtype == np.float32
    assert r["u.mean"].tobytes() == new["u.mean"].tobytes(), "what is not coded arrives as it is"


def test_the_bits_follow_the_documented_operations() -> None:
    old, new = model(0), model(1)
    data = make_patch(old, new, CODED) or b""
    found = tensors.load(data)
    for at, name in enumerate(sorted(CODED)):
        step = np.float32(found[SCALES][at]) / np.float32(127)
        for index in np.ndindex(old[name].shape):
            expected = np.float32(old[name][index] + np.float32(np.float32(found[name][index]) * step))
            assert apply_patch(old, data)[name][index] == expected
        if name == "u.w":
            break


def test_what_a_patch_rounds_off_is_in_the_next() -> None:
    old, target = model(0), model(1)
    errors = []
    for _ in range(4):
        data = make_patch(old, target, CODED)
        if data is None:
            break
        old = apply_patch(old, data)
        errors.append(max(float(np.abs(old[name] - target[name]).max()) for name in CODED))
    assert errors[1] < errors[0] / 50 and errors[2] < errors[1]


def test_a_patch_of_nothing_is_none() -> None:
    assert make_patch(model(0), model(0), CODED) is None
    moved = model(0) | {"u.mean": np.zeros(5, np.float32)}
    assert set(tensors.load(make_patch(model(0), moved, set()) or b"")) == {"u.mean", SCALES}


def test_a_change_too_small_for_float32_levels_is_left_to_later() -> None:
    tiny = {"u.w": np.full(3, 1e-45, np.float32)}
    assert make_patch({"u.w": np.zeros(3, np.float32)}, tiny, CODED) is None


def test_halves_come_back_as_float32_and_what_does_not_fit_stays() -> None:
    weights: Arrays = {"u.w": np.array([1.0, 0.1], np.float32), "u.b": np.array([1e6], np.float32)}
    weights["u.mean"] = np.array([0.1], np.float32)
    sent = to_float16(weights, CODED)

    assert [sent[name].dtype for name in weights] == [np.float16, np.float32, np.float32]
    got = to_float32(sent)
    assert got["u.w"].tolist() == np.array([1.0, 0.1], np.float16).astype(np.float32).tolist()
    assert got["u.mean"] is weights["u.mean"]


SCALE = np.ones(1, np.float32)
BAD: dict[str, tuple[dict[str, Array], str]] = {
    "no scales": ({"u.b": np.zeros(5, np.int8)}, "hold 1 float32 scales"),
    "too few scales": ({"u.b": np.zeros(5, np.int8), SCALES: SCALE[:0]}, "hold 1 float32 scales"),
    "scales of another type": ({"u.b": np.zeros(5, np.int8), SCALES: np.ones(1)}, "hold 1 float32 scales"),
    "NaN": ({"u.b": np.zeros(5, np.int8), SCALES: SCALE * np.float32("nan")}, "not finite"),
    "infinity": ({"u.b": np.zeros(5, np.int8), SCALES: SCALE * np.float32("inf")}, "not finite"),
    "another shape": ({"u.b": np.zeros(4, np.int8), SCALES: SCALE}, "'u.b' is int8 \\(4,\\)"),
    "another tensor": ({"u.x": np.zeros(5, np.int8), SCALES: SCALE}, "no tensor 'u.x'"),
    "another type": ({"u.mean": np.zeros(5, np.float64), SCALES: SCALE[:0]}, "float64"),
    "another shape of a plain one": ({"u.mean": np.zeros(6, np.float32), SCALES: SCALE[:0]}, "\\(6,\\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_patch_that_does_not_fit_is_refused_with_a_reason(name: str) -> None:
    arrays, reason = BAD[name]

    with pytest.raises(BundleError, match=f"does not fit.*{reason}"):
        apply_patch(model(0), tensors.dump(arrays))


def test_a_patch_that_leads_beyond_float32_is_refused() -> None:
    old: Arrays = {"u.w": np.full(3, 3e38, np.float32)}
    data = tensors.dump({"u.w": np.full(3, 127, np.int8), SCALES: SCALE * np.float32(3e38)})

    with pytest.raises(BundleError, match=r"does not fit.*'u.w' would hold NaN or infinity"):
        apply_patch(old, data)


def test_bytes_that_are_no_patch_are_refused() -> None:
    with pytest.raises(BundleError, match="does not fit"):
        apply_patch(model(0), b"nonsense")
