"""Bundles of an algorithm's functions, without a tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgefl.contract.algorithm import Algorithm
from edgefl.wire.bundle.archive import BundleArchive
from edgefl_export.compiler.compiler import Compiler, target_of
from edgefl_export.compiler.request import CompileRequest
from edgefl_export.target import Target


def request_of(algorithm: Algorithm, units: tuple[str, ...], **request: Any) -> CompileRequest:
    """Return the request to compile ``algorithm`` for a device that trains ``units``."""
    return CompileRequest(**({"model": "net", "tier": "tier"} | request), algorithm=algorithm, units=units)


def build_bundle(
    algorithm: Algorithm,
    units: tuple[str, ...],
    *,
    format: str | Target = "onnx",
    on_progress: Callable[[str], None] = lambda _: None,
    **request: Any,
) -> BundleArchive:
    """Compile :func:`request_of` these arguments."""
    target = target_of(format) if isinstance(format, str) else format
    return Compiler(target).compile(request_of(algorithm, units, **request), on_progress).bundle
