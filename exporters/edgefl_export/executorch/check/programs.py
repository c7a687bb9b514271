"""Verification of programs in ExecuTorch's own runtime, beside torch, before they are published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from edgefl.contract.algorithm import Function
from edgefl.errors import ExportError
from edgefl_export.executorch.check.isolated import IsolatedRunner
from edgefl_export.executorch.check.ports import METHOD, read_ports
from edgefl_export.executorch.silent_import import portable_lib
from edgefl_export.verify.graphs import Run, Verification, compare, given, joined
from edgefl_export.verify.rounding import Array


def verify(function: Function, model: bytes, seed: int, *, quick: bool = False) -> Verification:
    """Compare a program in ExecuTorch with torch, as :func:`edgefl_export.verify.graphs.verify` does for onnxruntime."""
    return compare(function, load(function, model), seed, quick=quick)


def verify_isolated(function: Function, model: bytes, seed: int, runner: IsolatedRunner) -> Verification:
    """Compare bytes that may be damaged, as :func:`verify`: the program runs in the process of ``runner``."""
    names, made = _names(function, model)

    def run(arrays: Mapping[str, Array]) -> Sequence[Array]:
        return joined(made, runner.run(function.name, model, [given(name, arrays) for name in names]))

    return compare(function, run, seed)


def _names(function: Function, model: bytes) -> tuple[list[str], list[str]]:
    """Return the names of inputs and of outputs."""
    try:
        inputs, outputs = read_ports(model)
        return [port.name for port in inputs], [port.name for port in outputs]
    except ValueError as error:
        raise _refused(function, "read", error) from error


def load(function: Function, model: bytes) -> Run:
    """Return a run of ``model`` in ExecuTorch's Python runtime.

    Its inputs are the read ones of ``function``, some as rows.
    """
    try:
        module = portable_lib()._load_for_executorch_from_buffer(model)
    except RuntimeError as error:
        raise _refused(function, "load", error) from error
    names, made = _names(function, model)

    # ``held``: the runtime reads the bytes where they lie, for as long as it runs.
    def run(arrays: Mapping[str, Array], held: bytes = model) -> Sequence[Array]:
        try:
            outputs = module.run_method(
                METHOD, tuple(torch.from_numpy(given(name, arrays).copy()) for name in names)
            )
        except RuntimeError as error:
            raise _refused(function, "run", error) from error
        return joined(made, [value.numpy() for value in outputs])

    return run


def _refused(function: Function, verb: str, error: Exception) -> ExportError:
    return ExportError(
        f"ExecuTorch cannot {verb} the program of function {function.name!r}: {error}", function=function.name
    )
