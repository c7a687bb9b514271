"""Gradients that add up at equal positions: large enough that a runtime would share the work among threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl_export.decompositions.indexing import PRODUCT_ROWS
from tests.pairs import in_turn
from tests.parity.forms import runner_of, written
from tests.parity.ops.case import lossy

ROWS, WIDTH, COUNT, USED = 1000, 32, 4096, 7
assert ROWS > PRODUCT_ROWS > USED


def embedding(w: Tensor, i: Tensor) -> Tensor:
    return torch.nn.functional.embedding(i, w)


def indexing(w: Tensor, i: Tensor) -> Tensor:
    return w[i]


def two_indices(w: Tensor, i: Tensor) -> Tensor:
    return w.view(-1, 10, WIDTH)[i, i]


def index_select(w: Tensor, i: Tensor) -> Tensor:
    return w.index_select(0, i)


def gather(w: Tensor, i: Tensor) -> Tensor:
    return w.gather(0, i.unsqueeze(1).expand(-1, WIDTH))


PICKS = [embedding, indexing, two_indices, index_select, gather]


@pytest.mark.parametrize(
    ("pick", "rows", "form"),
    in_turn(
        [(pick, (ROWS, 10 * USED)[number % 2]) for number, pick in enumerate(PICKS)],
        rare=[(pick, (10 * USED, ROWS)[number % 2]) for number, pick in enumerate(PICKS)],
    ),
)
def test_no_addition_is_lost_with_several_threads(pick: object, rows: int, form: str) -> None:
    def fn(tensors: Tensors) -> Tensors:
        w = tensors["state.w"].clone().requires_grad_()
        picked = pick(w, tensors["batch.0.i"])  # type: ignore[operator]
        return {"record.grad": torch.autograd.grad(picked, w, tensors["batch.0.g"])[0]}

    ports = {
        "state.w": TensorSpec((rows, WIDTH)),
        "batch.0.i": TensorSpec((COUNT,), torch.int64),
        "batch.0.g": TensorSpec((COUNT, WIDTH)),
    }
    function = Function("grad", fn, ports, label_range=USED)
    run = runner_of(form, function, threads=2)
    example = function.example(0)
    exact = fn(
        {name: value.double() if value.is_floating_point() else value for name, value in example.items()}
    )
    expected = exact["record.grad"].numpy()

    found = [run(example)["record.grad"] for _ in range(5)]

    # What follows would pass by luck now and then.
    assert form != "onnx" or not lossy(written(form, function))
    assert np.abs(found[0] - expected).max() <= 1e-5 * np.abs(expected).max()
    assert all(np.array_equal(found[0], other) for other in found), "the order of additions varies"
