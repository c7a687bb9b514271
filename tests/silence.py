"""Processes that nobody told to keep silent."""

from __future__ import annotations

import os

_KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "EDGEFL_CPP_BUILD")
"""onnxruntime is silent where one of a dozen variables of build services is set: those that are left out here."""


def frank_environment(home: object, **more: str) -> dict[str, str]:
    """The environment of a process whose home folder is ``home``."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return {**kept, **threads, "HOME": str(home), **more}
