"""Views: what the first pass could view in place, in the memory layout that the second pass gives it."""

from __future__ import annotations

import torch
from torch import Tensor

from exporters.decompositions.rule import DECLINED, Rules

_aten = torch.ops.aten


def view(x: Tensor, size: list[int]) -> Tensor:
    """``x.view(size)``; of a copy in memory order where ``x`` is not contiguous.

    A rule may give its result other strides than the op had (a channels-last convolution becomes matrix products),
    and a view that was recorded behind it then fits no more. ONNX knows no strides, so the copy costs nothing there.
    """
    return DECLINED if x.is_contiguous() else x.contiguous().view(size)


RULES: Rules = {_aten.view.default: view}
