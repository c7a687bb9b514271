"""Regions of a graph for ExecuTorch's XNNPACK delegate."""

from edgefl_export.executorch import silent_import as _silent  # noqa: F401 - before any module that imports executorch
