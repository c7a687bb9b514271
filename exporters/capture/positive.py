"""``edgefl::positive(x)``: 1 where x > 0, else 0, of any shape, in the dtype of x.

An op of ours because a comparison and a cast are two, which runtimes run on one thread; :mod:`exporters.onnx.ops` writes
it as one that they divide.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("edgefl", "FRAGMENT")
_library.define("positive(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))


def _positive(x: Tensor) -> Tensor:
    return x.gt(0).to(x.dtype)


_library.impl("positive", _positive, "CompositeExplicitAutograd")
POSITIVE = torch.ops.edgefl.positive.default
