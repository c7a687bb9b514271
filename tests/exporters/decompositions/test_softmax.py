"""Softmax of rows that may be masked, as attention takes it."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from edgefl.contract.tensors import Tensors
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import load
from tests.exporters.examples import op_types, pointwise

SEEN = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)
"""The last row may look at nothing."""


def attended(t: Tensors) -> Tensors:
    """Attention under a mask, and the gradient of its sum."""
    q = t["batch.q"].detach().requires_grad_()
    out = F.scaled_dot_product_attention(q, t["batch.k"], t["batch.k"], attn_mask=SEEN)
    (grad,) = torch.autograd.grad((out * out).sum(), q)
    return {"metric.out": out.detach(), "metric.grad": grad}


def test_a_row_without_anything_to_look_at_is_zero() -> None:
    function = pointwise(attended, batch__q=(2, 3, 4), batch__k=(2, 3, 4))
    model, example = to_onnx(capture(function)), function.example(1)

    found = load(function, model, ())({name: value.numpy() for name, value in example.items()})

    expected = function(example)
    assert not expected["metric.out"][:, -1].any() and not expected["metric.grad"].isnan().any()
    for mine, value in zip(found, expected.values(), strict=True):
        np.testing.assert_allclose(mine, value.numpy(), rtol=1e-5, atol=1e-6)


def test_no_entry_is_looked_at_by_itself() -> None:
    """The largest number of a row tells whether all of it is masked."""
    function = pointwise(attended, batch__q=(2, 3, 4), batch__k=(2, 3, 4))

    ops = op_types(to_onnx(capture(function)))

    assert ops.count("Equal") == 1 and "Not" not in ops
