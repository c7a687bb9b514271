"""Operators of our own.

``edgefl::after(x, trigger)`` is x, but not before ``trigger`` has been computed. Runtimes reorder and merge what has no data
dependence; :mod:`edgefl_export.onnx.ops` writes it as a Reshape whose shape is known only once the trigger is, which copies
nothing.

``edgefl::positive(x)`` is 1 where x > 0, else 0, of any shape, in the dtype of x. A comparison and a cast would be two ops,
which runtimes run on one thread; :mod:`edgefl_export.onnx.ops` writes it as one that they divide.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("edgefl", "FRAGMENT")
_library.define("after(Tensor x, Tensor trigger) -> Tensor")
_library.define("positive(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))


def _after(x: Tensor, trigger: Tensor) -> Tensor:
    return x.clone()


def _positive(x: Tensor) -> Tensor:
    return x.gt(0).to(x.dtype)


_library.impl("after", _after, "CompositeExplicitAutograd")
_library.impl("positive", _positive, "CompositeExplicitAutograd")
AFTER = torch.ops.edgefl.after.default
POSITIVE = torch.ops.edgefl.positive.default
