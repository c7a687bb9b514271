"""Python functions as machine code that many threads may run at once, and addresses as arrays of numbers.

numba keeps what it compiled on disk, and checks only the file that defines a function to see whether that is
still right: what a compiled function takes from another file (a number, a compiled helper) is frozen into it. So the
modules of compiled functions define their numbers and helpers themselves. Only this file,
:mod:`edgefl_server.aggregate.blocks` and what :mod:`edgefl_server.aggregate.scatter` says of blocks are shared: after a
change of them, delete the ``__pycache__`` folder of the server.

Whoever calls a compiled function imports its module where it calls it: numba takes 65 MB, which a server that waits for its
first update need not have.
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
"""An array that compiled code reads or fills; numba takes the element's type from the call."""
Number = Any
"""A number in compiled code, of Python or of numpy."""

_features: Callable[[], str] = codegen.get_host_cpu_features

FUSED: bool = "+fma" in _features() or machine().lower() in ("arm64", "aarch64")
"""Whether this processor has an instruction for :func:`fused`. numba keeps what it compiles for each sort of processor."""

_pointer_to: Callable[[Any], Any] = types.CPointer


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function at its first use and cache it on disk. Without a writable folder, each process compiles anew."""
    try:
        return cast(Callable[_P, _R], njit(nogil=True, cache=True)(function))
    except RuntimeError:  # "cannot cache function: no locator available"
        return cast(Callable[_P, _R], njit(nogil=True)(function))


def pointer(element: Any) -> Any:
    """Return a function that compiled code calls to read an address (uint64) as an array of ``element``."""

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
    """Return a function of a 64-bit number that is one instruction of the processor.

    ``made`` emits it for a builder, the number, and the type of the result.
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
"""Have the line of memory at an address (uint64) brought near while the processor goes on; any may be asked for."""


def _fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


fused: Any = intrinsic(_fused)
"""``a * b + c`` of three float64, rounded once; fast where :data:`FUSED`."""

lowest_bit = _instruction(
    types.uint64, types.uint64, lambda builder, word, _: builder.cttz(word, cgutils.true_bit)
)
"""The place of the lowest bit that is set in a word, which must not be 0."""
set_bits = _instruction(types.uint64, types.uint64, lambda builder, word, _: builder.ctpop(word))
"""How many bits of a word are set."""
bits_of = _instruction(
    types.float64, types.int64, lambda builder, number, kind: builder.bitcast(number, kind)
)
"""The bits of a float64, as an int64."""
