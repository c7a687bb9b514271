"""Which ops XNNPACK runs, and what each becomes there. An emitter says whether it accepts a node (the dtype and the rank
are checked before) and writes it; what it does not accept runs on ExecuTorch's kernels."""

from __future__ import annotations

from typing import Any

from exporters.executorch.xnnpack import axes, pointwise, products, sums
from exporters.executorch.xnnpack.emitter import Emitter

EMITTERS: dict[Any, Emitter] = {
    **axes.EMITTERS,
    **pointwise.EMITTERS,
    **products.EMITTERS,
    **sums.EMITTERS,
}
