"""Users of a model with several inputs: what is told of them reads all inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from edgefl.analysis.heterogeneity.losses import Losses, Shard, batches
from edgefl.analysis.personal.evaluate import EvaluationSetting
from edgefl.analysis.personal.finished import FinishedRun
from edgefl.api.analysis import heterogeneity
from edgefl.api.deploy import deploy
from edgefl.data.dataset import Dataset, OtherInput
from edgefl.models.split import split
from tests.analysis.personal.conftest import Leave
from tests.models.test_inputs import CLASSES, LENGTH, TEXT, WORDS, batch, objective_of, reader


def texts(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The class of a text is that of its last word; what comes after it is noise that the mask hides."""
    random = np.random.default_rng(seed)
    mask = (np.arange(LENGTH) < random.integers(1, LENGTH + 1, (count, 1))).astype(np.int64)
    words = random.integers(WORDS, size=(count, LENGTH))
    return words, mask, words[np.arange(count), mask.sum(1) - 1] % CLASSES


@pytest.fixture
def folder(leave: Leave, tmp_path: Path) -> Path:
    (x, mask, y), (test_x, test_mask, test_y) = texts(90, 0), texts(60, 1)
    others = {"attention_mask": OtherInput(mask, test_mask, 2)}
    data = Dataset.of(x, y, test_x, test_y, below=WORDS, classes=CLASSES, others=others)
    return leave(
        model={"name": "tests.models.test_inputs:Reader"},
        data={"name": "file", "file": str(data.save(tmp_path / "texts.npz"))},
        tiers={"strong": {"count": 2}, "weak": {"cut": 2, "count": 1}},
    )


@pytest.mark.slow
def test_the_users_of_a_run_are_judged_with_all_inputs(folder: Path) -> None:
    finished = FinishedRun.open(folder)

    report = finished.report(EvaluationSetting(0.3, (20,), 8))

    assert [user.name for user in report.users] == ["strong-0", "strong-1", "weak-0"]
    assert report.curve[-1].loss < report.curve[0].loss
    for user in finished.users:
        user.others["attention_mask"].fill_(1)
    assert finished.report(EvaluationSetting(0.3, (), 8)).curve[0].loss != report.curve[0].loss


@pytest.mark.slow
def test_the_run_is_deployed_and_its_users_are_compared(folder: Path) -> None:
    made = deploy(folder / "model.safetensors")
    assert made.artifact.inputs == ("ids", "attention_mask")

    _, report = heterogeneity(folder, users=1, samples=12)
    assert len(report.gradients.norms) == 3 and report.gradients.largest > 0


def test_gradients_of_a_user_are_those_of_the_module_with_its_mask() -> None:
    module, given = reader(), batch(8)
    spec = split(module, sample=TEXT, classes=CLASSES)
    losses = Losses(objective_of(spec), spec.weights)
    parts = batches(Shard(given["x"], given["y"], {"attention_mask": given["attention_mask"]}), 0)

    found = losses.mean(lambda part: losses.gradient(losses.start, part), parts)

    out = module(given["x"], given["attention_mask"])
    nn.functional.cross_entropy(out, given["y"]).backward()
    expected = torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None])
    torch.testing.assert_close(found.sort().values, expected.sort().values, rtol=1e-4, atol=1e-6)
