"""Whether another form of a graph computes what the graph does, before anybody downloads it."""

from __future__ import annotations

from edgefl.wire.bundle.variants import strays
from edgefl.wire.errors import ExportError
from edgefl.wire.tensors import Arrays
from exporters.artifact import Artifact
from exporters.capture.trace import Captured
from exporters.verify.graphs import in_order, load


def agree(captured: Captured, artifact: Artifact, other: bytes, seed: int) -> bool:
    """Whether onnxruntime runs ``other`` here, and gives what it gives of ``artifact`` on an example of the function."""
    given = {name: value.numpy() for name, value in captured.function.example(seed).items()}

    def run(model: bytes) -> Arrays:
        outputs = in_order(load(captured.function, model, artifact.in_place)(given), captured.outputs)
        return dict(zip(captured.outputs, outputs, strict=True))

    expected = run(artifact.model)
    try:
        return not strays(run(other), expected, given)
    except ExportError:  # its ops are not in this onnxruntime
        return False
