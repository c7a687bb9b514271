"""What the benchmark train-step compares with: it trains the same, and where it cannot run the row says why."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.repetition import StepWorker
from benchmarks.torch_layers import to_torch_layers
from benchmarks.train_step import baselines
from benchmarks.train_step.baselines import (
    BaselineResult,
    RaceJob,
    TrainStepSettings,
    loss_error,
    open_baseline,
)
from benchmarks.train_step.command import measure
from benchmarks.train_step.eager import built, channels_last, compiled, optimizer, stepper
from edgefl.errors import EdgeflError
from edgefl.models.losses.as_torch import loss_as_torch

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
Batches = list[tuple[Tensor, Tensor]]
Change = Callable[[nn.Module, Batches], tuple[nn.Module, Batches]]


def unchanged(module: nn.Module, batches: Batches) -> tuple[nn.Module, Batches]:
    return module, batches


def trained(
    model: str, change: Change, make: Callable[..., Callable[[], object]]
) -> tuple[list[object], dict[str, Tensor]]:
    """Losses and weights of three steps, which are as many as a worker makes before the race."""
    submodel = built(model, {"size": 8}, "strong")
    numbers = torch.Generator().manual_seed(0)
    shape = (4, *submodel.boundary.shape)
    batches = [(torch.randn(shape, generator=numbers), torch.arange(4)) for _ in range(2)]
    module, batches = change(to_torch_layers(submodel.suffix), batches)
    step = make(module, loss_as_torch(submodel.spec.loss), optimizer(module, **SGD), batches)
    return [step() for _ in range(baselines.FIRST)], dict(module.state_dict())


def test_with_channels_last_torch_trains_the_same_model() -> None:
    losses, wanted = trained("resnet8", unchanged, stepper)
    others, found = trained("resnet8", channels_last, stepper)

    assert others == pytest.approx(losses, rel=1e-5)
    for name, value in wanted.items():
        layout = torch.channels_last if value.dim() == 4 else torch.contiguous_format
        assert found[name].is_contiguous(memory_format=layout)
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_torch_compile_trains_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    losses, wanted = trained("mlp", unchanged, stepper)
    others, found = trained("mlp", unchanged, compiled)

    assert others == pytest.approx(losses, rel=1e-5)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def job(folder: Path, model: str, settings: TrainStepSettings | None = None) -> RaceJob:
    submodel = built(model, {}, "strong")
    return RaceJob(model, folder, submodel, settings or TrainStepSettings(), noisy=False)


def outcome_of(name: str, work: RaceJob) -> BaselineResult:
    with contextlib.ExitStack() as stack:
        return open_baseline(stack, name, work, StepWorker(()))


def test_channels_are_of_images(tmp_path: Path) -> None:
    outcome = outcome_of("channels_last", job(tmp_path, "bilstm"))

    assert outcome.worker is None and "only images have channels" in str(outcome.problem)
    assert outcome.fields("channels_last")["channels_last_ms"] is None


@pytest.mark.slow
def test_a_machine_without_a_compiler_costs_only_the_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    asked = TrainStepSettings(batch=2, repeat=1, options={"size": 4}, compile=True, channels_last=True)

    row = measure("mlp", asked)

    assert row.compile_ms is None and str(row.compile_error).startswith("torch.compile failed: ")
    assert "no-compiler" in str(row.compile_error) and "\n" not in str(row.compile_error)
    assert row.channels_last_error is None
    assert 0 < (row.channels_last_ms_min or 0) <= (row.channels_last_ms or 0)


@pytest.mark.slow
def test_the_compiled_step_stands_in_the_row() -> None:
    command = [sys.executable, "-m", "benchmarks", "train-step", "--model", "mlp", "--batch", "4"]
    more = ["--repeat", "1", "--option", "size=4", "--compile", "--json"]

    ran = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300, check=False)

    [row] = json.loads(ran.stdout)["results"]
    assert row["compile_error"] is None and row["compile_loss_error"] < 1e-5
    assert 0 < row["compile_ms_min"] <= row["compile_ms"]


def test_losses_of_something_else_are_told() -> None:
    assert loss_error([2.0, 1.5, 1.25], [2.0, 1.5, 1.2501]) == pytest.approx(8e-5, rel=1e-2)

    with pytest.raises(EdgeflError, match=r"trains something else: .*; 1\.5 and 1\.5; 1\.25 and 1\.4$"):
        loss_error([2.0, 1.5, 1.25], [2.0, 1.5, 1.4])
