"""Personal models of several inputs: the device adapts and judges with all of them, as torch does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from edgefl.analysis.personal.evaluate import EvaluationSetting, User, evaluate_user
from edgefl.analysis.personal.report import UserReport
from edgefl.models.split import split
from edgefl_device.data.samples import LocalData
from edgefl_device.personal.personalize import Adaptation, AdaptationReport, Personalizer
from tests.analysis.personal.tiers import BATCH, Tier, made
from tests.models.test_inputs import CLASSES, TEXT, reader
from tests.pairs import slow
from tests.parity.forms import engine_of
from tests.parity.rounds import local_data


@cache
def tier(cut: int, form: str = "onnx") -> Tier:
    return made(split(reader(), sample=TEXT, classes=CLASSES), form=form, cut=cut)


def data() -> tuple[LocalData, LocalData]:
    spec = tier(2).spec
    return local_data(spec, 21, 1), local_data(spec, 13, 2)


def on_device(made: Tier, local: LocalData, later: LocalData, folder: Path) -> AdaptationReport:
    device = Personalizer(
        engine=engine_of(made.form), manifest=made.bundle.manifest, blobs=made, folder=folder
    )
    return device.run(made.job(), local, Adaptation(steps=2, curve=(1,), alpha=0.3, test=later))[0]


def in_torch(made: Tier, local: LocalData, later: LocalData) -> UserReport:
    train, test = ((torch.from_numpy(each.x), torch.from_numpy(each.y)) for each in (local, later))
    others = {
        name: (torch.from_numpy(local.others[name]), torch.from_numpy(later.others[name]))
        for name in local.others
    }
    user = User.of(0, train=train, test=test, others=others)
    return evaluate_user(made.adapter, user, EvaluationSetting(0.3, (1, 2), BATCH))


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "form"), [(2, "onnx"), slow(0, "executorch"), slow(2, "executorch")])
def test_a_device_adapts_with_all_inputs_as_torch_does(cut: int, form: str, tmp_path: Path) -> None:
    found, expected = on_device(tier(cut, form), *data(), tmp_path), in_torch(tier(cut, form), *data())

    assert len(found.curve) == len(expected.curve)
    for mine, theirs in zip(found.curve, expected.curve, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert mine.metrics == pytest.approx(theirs.metrics, abs=1e-5)


def test_another_mask_adapts_to_another_model(tmp_path: Path) -> None:
    local, later = data()
    seen = replace(local, others={"attention_mask": np.ones_like(local.others["attention_mask"])})

    first, second = (on_device(tier(2), each, later, tmp_path) for each in (local, seen))

    assert first.before == second.before
    assert first.after.loss != second.after.loss
