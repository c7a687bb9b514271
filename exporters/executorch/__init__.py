"""ExecuTorch programs from captured functions."""

from __future__ import annotations

from edgefl.contract.program import Function
from exporters.capture.storing import stored_at_once
from exporters.capture.trace import Captured, Joint, capture
from exporters.executorch import silent_import  # noqa: F401 - first, so that the others are loaded in silence
from exporters.executorch.passes.rewrite import rewritten
from exporters.executorch.rules import table


def capture_for(function: Function, joint: Joint | None = None) -> Captured:
    """``function`` as a graph for ExecuTorch: its own rules, transpositions where they cost least.

    Raises ExportError as :func:`exporters.capture.trace.capture` does.
    """
    captured = rewritten(capture(function, table(), joint))
    stored_at_once(captured.module.graph)
    return captured
