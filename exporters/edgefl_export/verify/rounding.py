"""Measures of rounding: results of a function in float64, and the distance of torch's float32 results from them.

At the kink of a ReLU, the sign of a sum near zero decides whether a gradient flows. In deep models with batch norm, two
correct float32 results can therefore differ by a percent. Only a more exact result shows which of them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors
from edgefl.errors import ExportError

NUDGE = 2.0**-20
"""Relative change of a nudged entry: eight units of float32, as another order of sums gives. Less rarely reaches a kink."""
PROBES = 8

Array = NDArray[np.generic]


class ReferenceResults:
    """Reference results of one function on one example. Each is computed when it is first read.

    Args:
        function: the function.
        example: its inputs.
        double: compute :attr:`exact` in float64, which takes many times as long as float32. If false, :attr:`exact` is
            the float32 result, and rounding shows in the differences between slightly changed examples.
        proven: the function is known to be deterministic, so this is not checked again.
    """

    def __init__(
        self, function: Function, example: Tensors, *, double: bool = True, proven: bool = False
    ) -> None:
        self._function = function
        self._example = example
        self._double = double
        self._proven = proven
        self._strays: list[dict[str, float]] = []

    @cached_property
    def plain(self) -> Mapping[str, Array]:
        """Outputs in float32, as torch returns them."""
        return self._run(self._example)

    @cached_property
    def exact(self) -> Mapping[str, Array]:
        """Outputs in float64, or in float32 without ``double`` or if the function does not run in float64."""
        if not self._double:
            return self.plain
        try:
            return _arrays(run_in_double(self._function, self._example))
        except Exception:  # any function may come; for one that insists on float32 torch's result has to do
            return self.plain

    def strays(self, name: str) -> Iterator[float]:
        """Yield the largest distance so far between float32 runs and :attr:`exact` for output ``name``.

        The first run is on the example itself, the next ``PROBES`` on nudged examples. A run takes place only when its
        distance is asked for.

        Raises:
            ExportError: if a second run on the same example gives other outputs, because that is no rounding.
        """
        worst = 0.0
        for number in range(PROBES + 1):
            if number == len(self._strays):
                outputs = self._run(nudge(self._example, number)) if number else self._again()
                self._strays.append({key: distance(self.exact[key], outputs[key]) for key in outputs})
            worst = max(worst, self._strays[number][name])
            yield worst

    def _run(self, example: Tensors) -> dict[str, Array]:
        return _arrays(self._function(_copy(example)))

    def _again(self) -> Mapping[str, Array]:
        if self._proven:
            return self.plain
        again = self._run(self._example)
        for name, value in self.plain.items():
            # Equal bits, since torch on one machine adds in one order; NaN has no equal and is judged elsewhere.
            if not np.array_equal(value, again[name], equal_nan=value.dtype.kind == "f"):
                raise ExportError(
                    f"function {self._function.name!r} is not deterministic: output {name!r} differs between two runs "
                    "on the same inputs; randomness must be an input of role noise",
                    function=self._function.name,
                    output=name,
                )
        return again


def distance(expected: Array, found: Array) -> float:
    """Return the largest absolute difference between entries; for integers, the number of entries that differ."""
    if expected.dtype.kind != "f":
        return float(np.sum(expected != found))
    return float(np.max(np.abs(expected.astype(np.float64) - found.astype(np.float64)), initial=0.0))


def _arrays(tensors: Tensors) -> dict[str, Array]:
    return {name: value.detach().numpy() for name, value in tensors.items()}


def _copy(example: Tensors) -> Tensors:
    """Return a copy of all tensors in ``example``, because a function may update its arguments in place."""
    return {name: value.clone() for name, value in example.items()}


class _Float64Mode(TorchFunctionMode):
    """Torch function mode that computes in float64: it converts float32 tensors, constants and requested dtypes."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # `x.dtype` and its like are calls as well; what is no operation on values must see the tensor itself.
        if getattr(func, "__name__", "") in ("__get__", "__set__", "requires_grad_"):
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map(_to_double, (args, dict(kwargs or {})))
        if func is Tensor.float:
            func = Tensor.double
        result = func(*args, **kwargs)
        if not any(map(_is_narrow, pytree.tree_leaves(result))):
            return result
        # Made of Python's numbers or of integers, in the default dtype. It is the whole process's, so it stays.
        with suppress(Exception):
            result = _made_wide(func, args, kwargs)
        return pytree.tree_map(_to_double, result)


def _made_wide(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` again with float64 as dtype, or with integer tensors converted to float64 if it has tensor arguments."""
    leaves = pytree.tree_leaves((args, kwargs))
    if not any(isinstance(each, Tensor) for each in leaves):
        return func(*args, **{**kwargs, "dtype": torch.float64})
    args, kwargs = pytree.tree_map(_of_integers, (args, kwargs))
    return func(*args, **kwargs)


def _is_narrow(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in _WIDER


def _of_integers(value: Any) -> Any:
    is_whole = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    return value.double() if is_whole and value.dtype != torch.bool else value


_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def _to_double(value: Any) -> Any:
    if _is_narrow(value):
        with torch._C.DisableTorchFunction():
            return value.to(_WIDER[value.dtype])
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def run_in_double(function: Function, example: Tensors) -> Tensors:
    """Return the outputs of ``function`` on ``example`` in float64. Integer inputs are not converted."""
    with double_precision():
        return function({name: _to_double(value) for name, value in _copy(example).items()})


@contextmanager
def double_precision() -> Iterator[None]:
    """Make torch functions in this thread convert float32 tensors to float64 while the ``with`` block runs."""
    with _Float64Mode():
        yield


def nudge(example: Tensors, seed: int) -> Tensors:
    """Return a copy of ``example`` in which each float is multiplied by 1, 1 + NUDGE or 1 - NUDGE, at random by ``seed``."""
    generator = torch.Generator().manual_seed(seed)

    def moved(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value.clone()
        signs = torch.randint(-1, 2, value.shape, generator=generator)
        return (value * (1 + NUDGE * signs)).to(value.dtype)

    return {name: moved(value) for name, value in example.items()}


# Comparison on samples of several magnitudes, which show overflow and wrong signs that usual samples do not reach.
#
# It is coarse. The largest samples decide the magnitude of an output, so a small error of small samples is left to the usual
# comparison, and rounding may decide more here than there.

COARSE = 5e-2
"""Accepted error, relative to the largest entry of an output."""


def wide_example(function: Function, seed: int) -> tuple[Tensors, ReferenceResults] | None:
    """Return (example with samples of several magnitudes, torch's reference results on it).

    Return None if the function has no such example or fails on it, as it may if an integer is a position or a length.
    """
    example = function.wide_example(seed)
    if example is None:
        return None
    yardstick = ReferenceResults(function, example, double=False, proven=True)
    try:
        return (example, yardstick) if yardstick.plain else None
    except Exception:  # any function may come
        return None


def judge_wide(function: Function, name: str, found: Array, yardstick: ReferenceResults) -> None:
    """Check one output of a runtime on a wide example. Entries that are not finite in torch are ignored.

    Args:
        function: the function, for errors.
        name: name of the output.
        found: output of the runtime.
        yardstick: torch's results on the same example.

    Raises:
        ExportError: if the output differs from torch by more than ``COARSE`` and rounding allow.
    """
    expected = yardstick.plain[name]
    known = np.isfinite(expected) if expected.dtype.kind == "f" else np.ones(expected.shape, bool)
    expected, found = expected[known], found.reshape(known.shape)[known]
    if not expected.size:
        return
    scale = float(np.max(np.abs(expected))) if expected.dtype.kind == "f" else float(expected.size)
    allowed = COARSE * scale + 1e-6
    error = distance(expected, found)
    # Not "error > allowed": NaN is never accepted.
    if expected.dtype.kind != "f":
        allowed = 0.0
    if error <= allowed or any(error <= 2 * strayed for strayed in yardstick.strays(name)):
        return
    raise ExportError(
        f"output {name!r} of function {function.name!r} differs from torch by {error:.3g} on samples of several magnitudes, "
        f"allowed are {allowed:.3g} (the largest entry is {scale:.3g}); the rule of one of its ops is wrong there",
        function=function.name,
        output=name,
        error=error,
        tolerance=allowed,
    )
