"""Whether another form of a graph computes what the graph does, before anybody downloads it."""

from __future__ import annotations

from collections.abc import Callable

from edgefl.wire.bundle.variants import strays
from edgefl.wire.errors import ExportError
from exporters.capture.trace import Captured
from exporters.verify.graphs import Run, Verification, in_order


def agree(captured: Captured, load: Callable[[], Run], verified: Verification) -> bool:
    """Whether the form of ``captured`` that ``load`` gives runs here, and makes what another one did of the example on
    which that was ``verified``."""
    example = {name: value.numpy() for name, value in captured.function.example(verified.seed).items()}
    try:
        outputs = in_order(load()(example), captured.outputs)
    except ExportError:  # its ops are not in this runtime
        return False
    return not strays(dict(zip(captured.outputs, outputs, strict=True)), verified.found, example)
