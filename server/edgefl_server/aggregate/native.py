"""Compilation of Python functions to machine code that runs in several threads, and arrays at memory addresses.

numba caches compiled functions on disk. To detect changes it checks only the file that defines a function. A number
or compiled helper from another file is frozen into the cached code. So the modules of compiled functions define their
numbers and helpers themselves. Shared are only this file, :mod:`edgefl_server.aggregate.blocks` and the block columns
of :mod:`edgefl_server.aggregate.scatter`: after a change of them, delete the ``__pycache__`` folder of the server.

Callers import modules of compiled functions inside the functions that use them. numba takes 65 MB, which a server
without updates does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from platform import machine
from typing import Any, ParamSpec, TypeVar, cast

import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, codegen
from numba.extending import intrinsic

_P = ParamSpec("_P")
_R = TypeVar("_R")

Numbers = npt.NDArray[Any]
"""Array that compiled code reads or fills. numba infers the type of its elements from the call."""
Number = Any
"""Number in compiled code, of Python or numpy."""

_features: Callable[[], str] = codegen.get_host_cpu_features

FUSED: bool = "+fma" in _features() or machine().lower() in ("arm64", "aarch64")
"""True if this processor has an instruction for :func:`fused`. numba caches code for each kind of processor separately."""

_pointer_to: Callable[[Any], Any] = types.CPointer


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return ``function`` compiled by numba at its first call, without the GIL.

    The machine code is cached on disk. If the folder is not writable, each process compiles again.
    """
    try:
        return cast(Callable[_P, _R], njit(nogil=True, cache=True)(function))
    except RuntimeError:  # "cannot cache function: no locator available"
        return cast(Callable[_P, _R], njit(nogil=True)(function))


def pointer(element: Any) -> Any:
    """Return a numba intrinsic that turns a memory address (uint64) into a pointer to values of numba type
    ``element``.

    Compiled code indexes the pointer like an array. Nothing checks its bounds.
    """

    @intrinsic
    def at(typing_context: Any, address: Any) -> Any:
        kind = _pointer_to(element)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.uint64), generate

    return at


bytes_at = pointer(types.uint8)
words_at = pointer(types.uint64)
longs_at = pointer(types.int64)
shorts_at = pointer(types.uint16)
patterns_at = pointer(types.uint32)
floats_at = pointer(types.float32)


def _instruction(given: Any, found: Any, made: Callable[[Any, Any, Any], Any]) -> Any:
    """Return a numba intrinsic that maps a 64-bit number to the result of one processor instruction.

    Args:
        given: numba type of the argument.
        found: numba type of the result.
        made: Function of (builder, argument, LLVM type of the result) that emits the instruction.
    """

    @intrinsic
    def of(typing_context: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return made(builder, arguments[0], context.get_value_type(found))

        return found(given), generate

    return of


def _prefetch(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, line = context.get_value_type(types.int32), cgutils.voidptr_t
        kind = ir.FunctionType(ir.VoidType(), [line, number, number, number])
        call = builder.module.declare_intrinsic("llvm.prefetch", [line], kind)
        to_read, nearest, data = number(0), number(3), number(1)
        builder.call(call, [builder.inttoptr(arguments[0], line), to_read, nearest, data])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


prefetch: Any = intrinsic(_prefetch)
"""Intrinsic that prefetches the cache line at an address (uint64). Any address is permitted."""


def _fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


fused: Any = intrinsic(_fused)
"""Intrinsic for ``a * b + c`` of float64 numbers, rounded once. It is fast if :data:`FUSED` is True."""

lowest_bit = _instruction(
    types.uint64, types.uint64, lambda builder, word, _: builder.cttz(word, cgutils.true_bit)
)
"""Intrinsic for the position of the lowest set bit of a word, which must not be 0."""
set_bits = _instruction(types.uint64, types.uint64, lambda builder, word, _: builder.ctpop(word))
"""Intrinsic for the number of set bits of a word."""
bits_of = _instruction(
    types.float64, types.int64, lambda builder, number, kind: builder.bitcast(number, kind)
)
"""Intrinsic for the bits of a float64 as int64."""
