"""What numba keeps of the compiled loops, and where it can keep nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import edgefl_server


@pytest.mark.parametrize("module", ["blocks", "code_kernels", "kernels", "scans"])
def test_compiled_loops_depend_on_cached_files_only(module: str) -> None:
    """A number that another file defines would be frozen into the cache, and stale once that file is changed."""
    tree = ast.parse((Path(edgefl_server.__file__).parent / "aggregate" / f"{module}.py").read_text())
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    shared = {f"edgefl_server.aggregate.{each}" for each in ("native", "blocks", "scatter")}
    assert {node.module for node in taken} <= {"__future__", "typing", *shared}
    of_blocks = {
        name.name for node in taken if node.module == "edgefl_server.aggregate.scatter" for name in node.names
    }
    assert of_blocks <= {"BLOCK", "FIRST", "LENGTH", "SOURCE", "ROW", "TARGET"}, (
        "which say when to empty the cache"
    )


@pytest.mark.slow
def test_the_kernels_work_where_no_cache_can_be_written() -> None:
    """The fall back of a read-only installation: compiled in the process, nothing kept."""
    code = (
        "import numba.core.caching as c\n"
        "c.CacheImpl._locator_classes = []\n"
        "import numpy as np\nfrom edgefl_server.aggregate import scans\n"
        "a, counts = -np.ones(9, np.float32), np.array([9])\n"
        "assert scans.largest(np.array([a.ctypes.data], np.uint64), counts) == 0x3F800000\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=Path(__file__).parents[3])
