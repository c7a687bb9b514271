"""First releases of ONNX Runtime and ExecuTorch that load a compiled graph. Imports no torch."""

from __future__ import annotations

from importlib import metadata

from edgefl.wire.bundle.formats import numbers_of

RELEASES = {
    13: "1.6",
    14: "1.8",
    15: "1.10",
    16: "1.11",
    17: "1.12",
    18: "1.14",
    19: "1.15",
    20: "1.17",
    21: "1.18",
}
"""First release of ONNX Runtime that loads an opset."""
_IR_RELEASES = {7: "1.6", 8: "1.10", 9: "1.15", 10: "1.18"}
"""First release of ONNX Runtime that loads an IR version. It refuses a newer one even if it knows every operator."""


def least_onnxruntime(opset: int, ir: int) -> str:
    """Return the first release of ONNX Runtime, such as ``"1.18"``, that loads models of this opset and IR version."""
    newest = max(_IR_RELEASES)
    by_ir = _IR_RELEASES[min(max(ir, min(_IR_RELEASES)), newest)]
    return max(RELEASES[opset], by_ir, key=numbers_of)


def least_executorch() -> str:
    """Return the release of the installed ExecuTorch, such as ``"1.0"``. Older releases may not load its programs."""
    return ".".join(metadata.version("executorch").split(".")[:2])
