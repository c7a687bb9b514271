"""What leaves a device whose training diverged, and what of it stays there: in torch and on a device's engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from edgefl.contract.tensors import Tensors
from edgefl.setup.training import algorithm_of
from edgefl.wire.update.decode import widen
from tests.pairs import FORMATS, by_default, in_turn
from tests.parity.coding import federation, silence, submodel  # noqa: F401  silence: a fixture
from tests.parity.forms import runner_of

FEEDBACK: list[tuple[str, dict[str, object]]] = [
    ("ef_signsgd", {}),
    ("int8", {"feedback": True}),
    ("topk", {"feedback": True, "share": 0.02}),
]
DIVERGING: list[tuple[str, dict[str, object]]] = [
    ("float16", {}),
    ("bfloat16", {}),
    ("int8", {}),
    ("fedpaq", {}),
    ("scaled_sign", {}),
    ("signsgd", {}),
    ("noisy_signsgd", {}),
    ("stoc_signsgd", {}),
    ("topk", {"share": 0.02}),
    ("fedbat", {}),
    ("fedbat", {"step_size": "largest"}),
    *FEEDBACK,
]


class Finish:
    """``finish`` of a codec in torch and on a device's engine."""

    def __init__(self, form: str, codec: str, options: dict[str, object]) -> None:
        self.algorithm = algorithm_of(federation(codec, options), submodel("output_side"))
        self.run = runner_of(form, self.algorithm.finish)
        self.coded = self.algorithm.form.sections[0].names

    def example(self, seed: int, number: float | None = None, name: str = "") -> Tensors:
        """Inputs; the last entry of what training left of tensor ``name`` is ``number``."""
        example = self.algorithm.finish.example(seed)
        if number is not None:
            part = "change" if f"state.change.{name}" in example else "weights"
            example[f"state.{part}.{name}"].reshape(-1)[-1] = number
        return example

    def in_torch(self, example: Tensors) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in self.algorithm.finish(example).items()}

    def on_device(self, example: Tensors) -> dict[str, np.ndarray]:
        return self.run(example)


@cache
def coded(form: str, codec: str, options: tuple[tuple[str, object], ...] = ()) -> Finish:
    return Finish(form, codec, dict(options))


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    """Algorithms that stay open would keep later tests of this process from choosing a number of threads."""
    yield
    coded.cache_clear()


def finish_of(form: str, codec: str, options: dict[str, object]) -> Finish:
    """Exported once for all tests of it."""
    return coded(form, codec, tuple(options.items()))


ONCE: list[tuple[str, dict[str, object], str]] = [
    ("float16", {}, "onnx"),
    ("fedpaq", {}, "executorch"),
    ("fedbat", {}, "onnx"),
    ("ef_signsgd", {}, "onnx"),
    ("topk", {"feedback": True, "share": 0.02}, "executorch"),
]
"""One of each way to a number for a tensor: itself, its maximum, a trained one, its mean, the order of its entries."""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("codec", "options", "form"),
    by_default([(*each, form) for each, form in product(DIVERGING, FORMATS)], ONCE),
)
def test_one_infinite_weight_leaves_the_device(codec: str, options: dict[str, object], form: str) -> None:
    """The server refuses such an update; it cannot where an engine's maximum or order passes over NaN."""
    finish = finish_of(form, codec, options)
    told = ("update.scales", "update.values", "update.halves", "metric.finite")
    for run in (finish.in_torch, finish.on_device):
        whole = run(finish.example(3))
        assert all(np.isfinite(widen(whole[key])).all() for key in told if key in whole)
        for name in finish.coded:
            for number in (float("nan"), float("inf")):
                arrays = run(finish.example(3, number, name))
                floats = [widen(arrays[key]) for key in told if key in arrays]
                assert not all(np.isfinite(array).all() for array in floats), (name, number)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(("codec", "options", "form"), in_turn(FEEDBACK, every=2))
def test_a_round_that_diverged_does_not_end_in_the_residual(
    codec: str, options: dict[str, object], number: float, form: str
) -> None:
    finish = finish_of(form, codec, options)
    residuals = [name for name in finish.algorithm.finish.inputs if name.startswith("carry.")]
    for run in (finish.in_torch, finish.on_device):
        bad = finish.example(3, number, finish.coded[0])
        kept = run(bad)
        assert all(np.array_equal(kept[name], bad[name].numpy()) for name in residuals), "nothing was told"

        poisoned = finish.example(4)
        for name in residuals:
            poisoned[name].reshape(-1)[0] = number  # as an earlier edition may have left it
        clean = {name: torch.where(poisoned[name].isfinite(), poisoned[name], 0.0) for name in residuals}
        found, expected = run(poisoned), run(poisoned | clean)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
        assert all(np.isfinite(found[name]).all() for name in residuals)
        assert any((found[name] != clean[name].numpy()).any() for name in residuals)


@pytest.mark.parametrize("form", in_turn([()]))
def test_zeros_are_the_entries_that_did_not_change(form: str) -> None:
    finish = Finish(form, "signsgd", {})
    example = finish.example(3)
    name = finish.coded[0]
    example[f"state.weights.{name}"] = example[f"weights.{name}"].clone()
    for run in (finish.in_torch, finish.on_device):
        assert float(run(example)["metric.zeros"]) == example[f"weights.{name}"].numel()
