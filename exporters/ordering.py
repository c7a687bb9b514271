"""``edgefl::after(x, trigger)``: x, but not before ``trigger`` has been computed.

An op of ours because runtimes reorder and merge what has no data dependence; :mod:`exporters.onnx.ops` writes it as
a Reshape whose shape is known only once the trigger is, which copies nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("edgefl", "FRAGMENT")
_library.define("after(Tensor x, Tensor trigger) -> Tensor")


def _after(x: Tensor, trigger: Tensor) -> Tensor:
    return x.clone()


_library.impl("after", _after, "CompositeExplicitAutograd")
AFTER = torch.ops.edgefl.after.default
