"""ONNX models from captured functions."""

from __future__ import annotations

from edgefl.contract.program import Function
from exporters.capture.storing import stored_at_once
from exporters.capture.trace import Captured, Joint, capture
from exporters.onnx.selects import compared
from exporters.selections.multiply import selections_multiplied

REWRITTEN = ".next"
"""Ends the name of an output that an input has too."""


def capture_for(function: Function, joint: Joint | None = None) -> Captured:
    """``function`` as a graph for onnxruntime: with products for selections, and what waits in
    fewer bits stored at once.

    Raises ExportError as :func:`exporters.capture.trace.capture` does.
    """
    captured = capture(function, joint=joint)
    selections_multiplied(captured.module, tuple(captured.inputs), compared)
    stored_at_once(captured.module.graph)
    captured.module.recompile()
    return captured
