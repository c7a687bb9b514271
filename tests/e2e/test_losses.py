"""A federation whose loss is no classifier's: from its file to the live table and the history, on both engines."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

import edgefl
from edgefl.api.run import prepare
from edgefl.cli.federation.live import RunView
from edgefl.data.dataset import Dataset

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

VOCABULARY, LENGTH = 16, 10


class Speaker(nn.Module):
    """Counts on, if it has learned what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 12)
        self.hidden = nn.GRU(12, 12, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(self.words(x))[0])
        return out


def speaker() -> nn.Module:
    return Speaker()


def counting() -> Dataset:
    """Texts that count on from a random token; the first two tokens are a prompt, which is not learned."""
    rng = np.random.default_rng(0)
    x = (rng.integers(0, VOCABULARY, (180, 1)) + np.arange(LENGTH)) % VOCABULARY
    y = np.where(np.arange(LENGTH) < 2, -100, x)
    return Dataset.of(
        x[:150],
        y[:150],
        x[150:],
        y[150:],
        classes=VOCABULARY,
        below=VOCABULARY,
        ignored=-100,
        name="counting",
    )


def test_a_language_model_has_a_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = {
        "strong": edgefl.Tier(count=1),
        "weak": edgefl.Tier(submodel=edgefl.submodels.OutputSide(cut=1), engine="executorch"),
    }
    federation = edgefl.federation(
        speaker,
        rounds=3,
        tiers=tiers,
        data=edgefl.config.DataTable(
            name="file", file=str(counting().save(tmp_path / "counting.npz")), partition="iid"
        ),
        training=edgefl.Training(
            loss=edgefl.losses.CausalLM(),
            algorithm=edgefl.algorithms.SGD(lr=0.2, momentum=0.9, steps=10, batch=16),
        ),
    )
    prepared = prepare(federation, tmp_path / "run")
    view = RunView(prepared.federation, list(prepared.lab.devices), prepared.updates, live=True)
    with view:
        run = prepared.train(view.take)
    view.conclude(run.folder)

    said, perplexity = capsys.readouterr().out, run.curves["perplexity"]
    assert [row.metric for row in edgefl.load_run(run.folder).history] == ["perplexity"] * 3
    assert perplexity[-1] < perplexity[0] < 1.2 * VOCABULARY
    assert perplexity[-1] == pytest.approx(math.exp(run.curves["loss"][-1]), rel=1e-4)
    assert (
        f"round   3  perplexity {perplexity[-1]:.4g}" in said
        and f"final perplexity {perplexity[-1]:.4g}" in said
    )
