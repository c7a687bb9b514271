"""A whole round on the device runtime equals the same round in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgefl.submodels.output_side.submodel import OutputSide
from tests.invariants.embracingfl.tiny import tiny
from tests.pairs import in_turn
from tests.parity.rounds import exported, in_torch, local_data, on_device

BATCH, STEPS, LR = 8, 4, 0.05


@pytest.mark.parametrize(
    ("model", "cut", "chunks", "form"),
    in_turn(
        [("mlp", 0, 1), ("cnn", 2, 2), ("lstm_lm", 1, 1), ("mlp", 2, 2)],
        rare=[
            ("cnn", 0, 1),
            ("resnet8", 0, 1),
            ("resnet8", 3, 2),
            ("resnet8 static", 2, 1),
            ("lstm_lm", 0, 1),
        ],
        every=3,
    ),
)
def test_a_device_round_equals_torch(tmp_path: Path, model: str, cut: int, chunks: int, form: str) -> None:
    tier = exported(OutputSide(tiny(model), cut, chunks), batch=BATCH, steps=STEPS, lr=LR, form=form)
    data = local_data(tier.spec, 21, seed=5)

    result, _ = on_device(tier, data, 11, tmp_path, form)

    expected = in_torch(tier, data, 11)
    assert result.update.keys() == expected.keys() == set(tier.submodel.holds)
    for name, value in expected.items():
        scale = max(1e-3, float(value.abs().max()))
        assert np.abs(result.update[name] - value.numpy()).max() <= 1e-4 * scale, name
