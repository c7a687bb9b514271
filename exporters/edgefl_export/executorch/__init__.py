"""ExecuTorch programs from captured functions."""

from __future__ import annotations

from edgefl.contract.algorithm import Function
from edgefl_export.capture.storing import stored_at_once
from edgefl_export.capture.trace import Captured, Joint, capture
from edgefl_export.executorch import silent_import  # noqa: F401 - first, so that the others are loaded in silence
from edgefl_export.executorch.passes.rewrite import rewritten
from edgefl_export.executorch.rules import table


def capture_for(function: Function, joint: Joint | None = None) -> Captured:
    """``function`` as a graph for ExecuTorch: its own rules, transpositions where they cost least.

    Raises ExportError as :func:`edgefl_export.capture.trace.capture` does.
    """
    captured = rewritten(capture(function, table(), joint))
    stored_at_once(captured.module.graph)
    return captured
