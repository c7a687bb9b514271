"""The float64 run: what it covers, and the examples that differ by rounding."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgefl.contract.tensors import Tensors
from edgefl_export.verify.rounding import NUDGE, PROBES, Rounding, exactly, nudged
from tests.exporters.examples import pointwise, small_net, step_of

THIRD = torch.full((4, 4), 1 / 3, dtype=torch.float64)
CONSTANT = torch.full((4, 4), 3.0)
LAYER = nn.Linear(4, 4, bias=False)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w: w / 3,
        lambda w: w.float() / 3,
        lambda w: w.to(torch.float32) / 3,
        lambda w: w.type(torch.float32) / 3,
        lambda w: w / CONSTANT,
        lambda w: w @ torch.eye(4) / 3,
        lambda w: torch.full((4, 4), 1.0, dtype=torch.float32) * w / 3,
        lambda w: w / torch.tensor(3.0),
        lambda w: w * (torch.ones(4, 4, dtype=torch.int64) / 3),
        lambda w: w * torch.full((4, 4), 1 / 3),
        torch.func.grad(lambda x: (x * x / 6).sum()),
        lambda w: torch.func.functional_call(LAYER, {"weight": torch.eye(4) / 3}, (w,)),
    ],
)
def test_float64_reaches_every_operation(fn: Callable[[Tensor], Tensor]) -> None:
    function = pointwise(lambda t: {"update.w": fn(t["state.w"])}, state__w=(4, 4))

    found = exactly(function, {"state.w": torch.ones(4, 4)})["update.w"]

    torch.testing.assert_close(found, THIRD, rtol=1e-14, atol=0.0)


def test_other_threads_keep_the_default_type() -> None:
    def seen(t: Tensors) -> Tensors:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: torch.zeros(1).dtype).result() == torch.float32
        return {"update.w": t["state.w"]}

    exactly(pointwise(seen, state__w=(2,)), {"state.w": torch.zeros(2)})


def test_a_training_step_runs_in_float64_and_integers_stay() -> None:
    step = step_of(small_net(), (3, 8, 8))
    example = step.example(0)

    found = exactly(step, example)

    assert {value.dtype for value in found.values()} == {torch.float64}
    assert example["batch.0.y"].dtype == torch.int64 and example["batch.0.x"].dtype == torch.float32
    for name, value in step(example).items():
        np.testing.assert_allclose(value.detach().numpy(), found[name].detach().numpy(), rtol=1e-3, atol=1e-5)


def test_nudged_examples_differ_by_rounding_and_only_in_floats() -> None:
    example = {"x": torch.randn(1000), "y": torch.arange(5)}

    first, second = nudged(example, 1), nudged(example, 2)

    moved = (first["x"] / example["x"] - 1).abs()
    assert 0.5 * NUDGE < moved.max() <= 1.2 * NUDGE and torch.equal(first["y"], example["y"])
    assert not torch.equal(first["x"], second["x"]) and torch.equal(first["x"], nudged(example, 1)["x"])


def test_the_yardstick_of_a_smooth_function_is_tiny() -> None:
    function = pointwise(lambda t: {"update.w": 2 * t["state.w"]}, state__w=(64,))

    strays = list(Rounding(function, function.example(0)).strays("update.w"))

    assert len(strays) == PROBES + 1 and strays == sorted(strays)
    assert strays[0] < 1e-7 and strays[-1] < 2e-6
