"""Which ops XNNPACK runs, and what each becomes there. An emitter says whether it accepts a node (the dtype and the rank
are checked before) and writes it; what it does not accept runs on ExecuTorch's kernels."""

from __future__ import annotations

from typing import Any

from exporters.executorch.xnnpack import axes as xnn_axes
from exporters.executorch.xnnpack import pointwise as xnn_pointwise
from exporters.executorch.xnnpack import products as xnn_products
from exporters.executorch.xnnpack import sums as xnn_sums
from exporters.executorch.xnnpack.emitter import Emitter

EMITTERS: dict[Any, Emitter] = {
    **xnn_axes.EMITTERS,
    **xnn_pointwise.EMITTERS,
    **xnn_products.EMITTERS,
    **xnn_sums.EMITTERS,
}
