"""A bundle without its graphs: the manifest that a compiled one has, for whoever runs the functions themselves."""

from __future__ import annotations

from collections.abc import Collection

from edgefl.contract.program import Function
from edgefl.wire.bundle.formats import FormatName
from edgefl.wire.bundle.manifest import Graph
from exporters.artifact import Artifact
from exporters.capture.trace import Captured, Joint, capture
from exporters.memory.recompute import Budget
from exporters.verify.graphs import Verification


class Outline:
    """Captures each function, so that its ports are those of the compiled graph in the format ``name``, and writes
    nothing."""

    version = ""

    def __init__(self, name: FormatName = "onnx") -> None:
        self.name: FormatName = name

    def capture(self, function: Function, joint: Joint | None = None) -> Captured:
        return capture(function, joint=joint)

    def write(self, _captured: Captured) -> Artifact:
        return Artifact(b"")

    def write_within(self, _captured: Captured, _budget: Budget) -> tuple[Artifact, int]:
        return Artifact(b""), 0

    def verify(
        self,
        function: Function,
        _model: bytes,
        seed: int,
        _in_place: Collection[str] = (),
        *,
        quick: bool = False,
    ) -> Verification:
        return Verification(function.name, seed, {})

    def verify_again(
        self, function: Function, model: bytes, seed: int, in_place: Collection[str] = ()
    ) -> Verification:
        return self.verify(function, model, seed, in_place)

    def variants(self, _captured: Captured, _artifact: Artifact, _verified: Verification) -> dict[str, bytes]:
        return {}

    def differs(self, _graph: Graph, _model: bytes) -> str:
        return ""
