"""Notebooks, run in a real Jupyter kernel."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

LONGEST_S = 600


def run_cells(sources: Iterable[str], folder: Path, environment: Mapping[str, str]) -> list[list[Any]]:
    """Run code in a new kernel of this interpreter, and return the outputs of each cell.

    Args:
        sources: code of the cells.
        folder: working folder of the kernel.
        environment: variables of the kernel's process.

    Raises:
        CellExecutionError: a cell raised an error.
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in sources])
    manager = KernelManager()
    manager._kernel_spec = KernelSpec(  # whatever kernels the user has installed
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python"
    )
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, km=manager, timeout=LONGEST_S, resources=resources).execute(
        env=dict(environment)
    )
    return [cell.outputs for cell in notebook.cells]
