"""What torch.onnx would export wrong, and no rule can say, is refused by name instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from edgefl.errors import ExportError
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from tests.parity.ops.case import Case


def transposed(x: Tensor) -> Tensor:
    return x.t().as_strided((3, 2), (2, 1), 1)


def before_the_view(x: Tensor) -> Tensor:
    return (x * 2)[1:].as_strided((3, 2), (3, 1), 1)


def behind_the_view(x: Tensor) -> Tensor:
    return (x * 2)[:1].as_strided((3, 2), (3, 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("view", [transposed, before_the_view, behind_the_view])
def test_strides_over_memory_that_the_tensor_does_not_show_are_refused(view: Callable) -> None:
    with pytest.raises(ExportError, match=r"op aten\.as_strided\.default .* has no ONNX form") as caught:
        to_onnx(capture(Case(view, (4, 5)).step()))

    assert caught.value.details["op"] == "aten.as_strided.default"
