"""Whether another form of a graph computes what the graph does, before anybody downloads it."""

from __future__ import annotations

from edgefl.wire.bundle.variants import strays
from edgefl.wire.errors import ExportError
from exporters.artifact import Artifact
from exporters.capture.trace import Captured
from exporters.verify.graphs import Verification, in_order, load


def agree(captured: Captured, artifact: Artifact, other: bytes, verified: Verification) -> bool:
    """Whether onnxruntime runs ``other`` here, and gives what it gave of ``artifact`` on the example that was verified."""
    given = {name: value.numpy() for name, value in captured.function.example(verified.seed).items()}
    try:
        outputs = in_order(load(captured.function, other, artifact.in_place)(given), captured.outputs)
    except ExportError:  # its ops are not in this onnxruntime
        return False
    return not strays(dict(zip(captured.outputs, outputs, strict=True)), verified.found, given)
