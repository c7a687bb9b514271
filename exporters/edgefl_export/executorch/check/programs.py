"""Inputs and outputs of a program, read from its bytes without running it; damaged bytes are an error."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from flatbuffers import number_types
from flatbuffers.encode import Get
from flatbuffers.table import Table

from edgefl.contract.algorithm import Function
from edgefl.errors import ExportError
from edgefl_export.executorch.check.isolated import IsolatedRunner
from edgefl_export.executorch.silent_import import METHOD, portable_lib
from edgefl_export.verify.graphs import Run, Verification, compare, join_rows, port_array
from edgefl_export.verify.rounding import Array

IDENTIFIER = b"ET12"
# Places of fields in ExecuTorch's tables, in the order of their schema.
_PROGRAM_PLANS = 1
_PLAN_NAME, _PLAN_NAMES, _PLAN_VALUES, _PLAN_INPUTS, _PLAN_OUTPUTS = 0, 1, 2, 3, 4
_NAMES_INPUTS, _NAMES_OUTPUTS = 0, 1
_VALUE_KIND, _VALUE = 0, 1
_TENSOR_TYPE, _TENSOR_SIZES = 0, 2
TENSOR = 5
"""Number of tensors among the kinds of values."""
MOST_SIZES = 16
"""Axes of a tensor: ExecuTorch's own limit. Many ports may refer to one long list."""


@dataclass(frozen=True)
class TensorPort:
    """Input or output tensor of a program; ``dtype`` is ExecuTorch's number of the type."""

    name: str
    dtype: int
    shape: tuple[int, ...]


Ports = tuple[tuple[TensorPort, ...], tuple[TensorPort, ...]]


def read_ports(model: bytes) -> Ports:
    """Return (inputs, outputs) of the method ``forward`` of a program, in order, without running it.

    Raises:
        ValueError: if the bytes are damaged or are no program with that method and names of its ports.
    """
    try:
        return _ports(model)
    except (struct.error, LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"its tables are damaged: {error}") from error


def _ports(model: bytes) -> Ports:
    if model[4:8] != IDENTIFIER:
        raise ValueError("it does not begin as one")
    program = Table(model, int.from_bytes(model[:4], "little"))
    plans = _vector(program, _PROGRAM_PLANS, 4)
    plan = Table(model, program.Indirect(plans[0]))
    if _text(plan, _PLAN_NAME) != METHOD:
        raise ValueError(f"its first method is no {METHOD!r}")
    values = _vector(plan, _PLAN_VALUES, 4)
    names = Table(model, _place(plan, _PLAN_NAMES))
    return (
        _tensors(plan, _PLAN_INPUTS, values, _text(names, _NAMES_INPUTS)),
        _tensors(plan, _PLAN_OUTPUTS, values, _text(names, _NAMES_OUTPUTS)),
    )


def _tensors(plan: Table, slot: int, values: range, names: str) -> tuple[TensorPort, ...]:
    indices = [_integer(plan, at) for at in _vector(plan, slot, 4)]
    port_names = names.split("\n") if names else []
    if len(port_names) != len(indices):
        raise ValueError(f"it has {len(indices)} tensors for {len(port_names)} names")
    wrong = next((index for index in indices if not 0 <= index < len(values)), None)
    if wrong is not None:
        raise ValueError(f"it refers to value {wrong} of {len(values)}")
    return tuple(_tensor(plan, values[index], name) for index, name in zip(indices, port_names, strict=True))


def _tensor(plan: Table, at: int, name: str) -> TensorPort:
    value = Table(plan.Bytes, plan.Indirect(at))
    if _byte(value, _VALUE_KIND) != TENSOR:
        raise ValueError(f"{name!r} is no tensor")
    tensor = Table(plan.Bytes, _place(value, _VALUE))
    sizes = _vector(tensor, _TENSOR_SIZES, 4)
    if len(sizes) > MOST_SIZES:
        raise ValueError(f"{name!r} has {len(sizes)} axes, and {MOST_SIZES} is the most")
    return TensorPort(name, _byte(tensor, _TENSOR_TYPE), tuple(_integer(tensor, at) for at in sizes))


def _offset(table: Table, slot: int) -> int:
    """Return the offset of field ``slot`` within ``table``; 0 if the field is absent. Raise ValueError for bad offsets."""
    if not 0 <= table.Pos < len(table.Bytes):
        raise ValueError("its tables are damaged: an offset leads out of it")
    return int(table.Offset(4 + 2 * slot))


def _place(table: Table, slot: int) -> int:
    """Return the position of the table that field ``slot`` refers to. Raise ValueError if the field is absent."""
    at = _offset(table, slot)
    if not at:
        raise ValueError("its tables are damaged: a field is missing")
    return int(table.Indirect(table.Pos + at))


def _byte(table: Table, slot: int) -> int:
    at = _offset(table, slot)
    return int(Get(number_types.Uint8Flags.packer_type, table.Bytes, table.Pos + at)) if at else 0


def _integer(table: Table, at: int) -> int:
    return int(Get(number_types.Int32Flags.packer_type, table.Bytes, at))


def _vector(table: Table, slot: int, width: int) -> range:
    """Return the positions of the entries of the vector in field ``slot``, ``width`` bytes each; empty if it is absent."""
    at = _offset(table, slot)
    if not at:
        return range(0)
    start, count = table.Vector(at), table.VectorLen(at)
    if start + count * width > len(table.Bytes):
        raise ValueError("its tables are damaged: a list leads out of it")
    return range(start, start + count * width, width)


def _text(table: Table, slot: int) -> str:
    at = _offset(table, slot)
    return table.String(table.Pos + at).decode() if at else ""


# Verification of programs in ExecuTorch's own runtime, beside torch, before they are published.


def verify(function: Function, model: bytes, seed: int, *, quick: bool = False) -> Verification:
    """Run a program in ExecuTorch on an example and compare its outputs with torch.

    Args:
        function: function that the program computes.
        model: bytes of the program.
        seed: seed of the first example.
        quick: skip the float64 reference where the rounding error of float32 already explains a difference.

    Raises:
        ExportError: if the program does not load or run, or if an output differs by more than rounding.
    """
    return compare(function, load(function, model), seed, quick=quick)


def verify_isolated(function: Function, model: bytes, seed: int, runner: IsolatedRunner) -> Verification:
    """Compare a program that may be damaged with torch, in the child process of ``runner``.

    Raises:
        ExportError: if an output differs by more than rounding, or if the program fails, hangs or crashes the process.
    """
    names, made = _names(function, model)

    def run(arrays: Mapping[str, Array]) -> Sequence[Array]:
        return join_rows(made, runner.run(function.name, model, [port_array(name, arrays) for name in names]))

    return compare(function, run, seed)


def _names(function: Function, model: bytes) -> tuple[list[str], list[str]]:
    """Return (names of inputs, names of outputs) of a program. Raise ExportError if it cannot be read."""
    try:
        inputs, outputs = read_ports(model)
        return [port.name for port in inputs], [port.name for port in outputs]
    except ValueError as error:
        raise _runtime_error(function, "read", error) from error


def load(function: Function, model: bytes) -> Run:
    """Load a program into ExecuTorch's Python runtime and return a function that runs it.

    Ports of the program that are rows of a port of ``function`` are cut from its array and joined again.

    Raises:
        ExportError: if loading fails; the returned function raises it if running fails.
    """
    try:
        module = portable_lib()._load_for_executorch_from_buffer(model)
    except RuntimeError as error:
        raise _runtime_error(function, "load", error) from error
    names, made = _names(function, model)

    # ``held``: the runtime reads the bytes where they lie, for as long as it runs.
    def run(arrays: Mapping[str, Array], held: bytes = model) -> Sequence[Array]:
        try:
            outputs = module.run_method(
                METHOD, tuple(torch.from_numpy(port_array(name, arrays).copy()) for name in names)
            )
        except RuntimeError as error:
            raise _runtime_error(function, "run", error) from error
        return join_rows(made, [value.numpy() for value in outputs])

    return run


def _runtime_error(function: Function, verb: str, error: Exception) -> ExportError:
    return ExportError(
        f"ExecuTorch cannot {verb} the program of function {function.name!r}: {error}", function=function.name
    )
