"""What travels of a variant, and when two forms of a graph agree."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import BundleError
from edgefl.wire.bundle.variants import compress, decompress, differ

BASE = np.random.default_rng(0).bytes(10_000)
OTHER = BASE[:5000] + b"something else" + BASE[5000:]


@given(st.binary(min_size=8, max_size=200), st.binary(min_size=1, max_size=200))
def test_it_unfolds_to_what_was_folded(base: bytes, model: bytes) -> None:
    variant, frame = compress("other", model, 64, base=base)

    assert decompress(variant, frame, base=base) == model


def test_a_few_changes_are_a_few_bytes() -> None:
    random = np.random.default_rng(0).bytes(200_000)
    variant, frame = compress("other", random[:90_000] + b"changed" + random[90_000:], 1024, base=random)

    assert len(frame) < 200 and variant.blob.size == len(frame) and variant.raw == len(random) + 7


@pytest.mark.parametrize(
    ("change", "frame", "base", "message"),
    [
        ({}, b"no frame", BASE, "no zstd frame"),
        ({}, None, BASE[:-1], "zstd frame|not what its manifest names|unfold"),
        ({"raw": len(OTHER) - 1}, None, BASE, "does not unfold"),
        ({"raw": len(OTHER) + 1}, None, BASE, "does not unfold"),
        ({"raw": 0}, None, BASE, "no artifact to load"),
        ({"raw": 1 << 60}, None, BASE, "no artifact to load"),
        ({"sha256": "0" * 64}, None, BASE, "not what its manifest names"),
    ],
)
def test_another_one_than_the_manifest_names_is_refused(
    change: dict[str, Any], frame: bytes | None, base: bytes, message: str
) -> None:
    variant, made = compress("other", OTHER, 1024, base=BASE)

    with pytest.raises(BundleError, match=message):
        decompress(msgspec.structs.replace(variant, **change), frame or made, base=base)


W, BIAS, LOSS, RIGHT = "state.weights.w", "state.weights.b", "metric.loss", "metric.correct"
BEFORE = {W: np.array([[1.0, 2.0]]), BIAS: np.array([0.0]), "state.steps": np.array(0)}
AFTER = {W: np.array([[1.5, 2.0]]), BIAS: np.array([1e-9]), "state.steps": np.array(1), LOSS: np.array(0.7)}
AFTER |= {RIGHT: np.array(4.0)}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({W: np.array([[1.501, 2.001]]), BIAS: np.array([-1e-9])}, ""),
        ({W: np.array([[1.4, 2.0]])}, "it changes state.weights.w by 0.5 and 0.1 beside that"),
        ({W: np.array([[np.nan, 2.0]])}, "it changes state.weights.w"),
        ({BIAS: np.array([0.2])}, "it changes state.weights.b"),
        ({LOSS: np.array(0.71)}, ""),
        ({LOSS: np.array(0.8)}, "metric.loss differs by 0.1"),
        ({RIGHT: np.array(3.0)}, ""),
        ({RIGHT: np.array(1.0)}, "metric.correct differs by 3"),
        ({LOSS: np.array([0.7])}, "it has other outputs"),
        ({"metric.other": np.array(1.0)}, "it has other outputs"),
    ],
)
def test_forms_agree_that_change_the_state_alike(change: dict[str, Any], why: str) -> None:
    found = differ(AFTER | change, AFTER, BEFORE)

    assert (found == "") == (why == "") and why in found


def test_a_state_that_nothing_moves_is_alike_where_it_stays() -> None:
    assert differ(BEFORE, BEFORE, BEFORE) == ""
    assert differ(AFTER, BEFORE | {LOSS: AFTER[LOSS], RIGHT: AFTER[RIGHT]}, BEFORE)
