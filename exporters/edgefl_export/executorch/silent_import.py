"""Import of ExecuTorch's Python package without its heavy parts and without its error output.

The compiler needs neither its exporter and partitioner (1,500 modules) nor its messages about missing GPU libraries of
torchao and about Android's files that count processor cores.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edgefl.system.lazy_modules import parts_alone

METHOD = "forward"
"""Name of the method of a program that runs its function."""

_MODULES = (
    "executorch.exir.schema",
    "executorch.exir.scalar_type",
    "executorch.exir._warnings",
    "executorch.exir._serialize._program",
    "executorch.backends.xnnpack.serialization.xnnpack_graph_serialize",
)
_one_at_a_time = threading.Lock()  # two that closed the error output at once would not find it again


def _import_schema() -> None:
    """Import the schema modules, so that later imports of writer and runtime are quick and silent."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with parts_alone("executorch.exir", "executorch.backends.xnnpack"):
            for name in _MODULES:
                module = importlib.import_module(name)
                # Reads a file of its folder, which asks for the package, and keeps it.
                getattr(module, "_get_schema_bytes", bytes)()
    finally:
        logging.disable(before)


@functools.cache
def portable_lib() -> Any:
    """Return the Python bindings of ExecuTorch's runtime. Starts its threads and hides its C++ error output."""
    library = importlib.import_module("executorch.extension.pybindings.portable_lib")
    with _one_at_a_time, _no_error_output():
        library._threadpool_get_thread_count()
    return library


@contextmanager
def _no_error_output() -> Iterator[None]:
    """Redirect file descriptor 2 to /dev/null while the block runs, because C++ code writes to it directly."""
    original = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
        os.close(nowhere)


_import_schema()
