"""Comparison on samples of several magnitudes, which show overflow and wrong signs that usual samples do not reach.

It is coarse. The largest samples decide the magnitude of an output, so a small error of small samples is left to the usual
comparison, and rounding may decide more here than there.
"""

from __future__ import annotations

import numpy as np

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors
from edgefl.errors import ExportError
from edgefl_export.verify.rounding import Array, Rounding, distance

COARSE = 5e-2
"""Accepted error, relative to the largest entry of an output."""


def expected_of(function: Function, seed: int) -> tuple[Tensors, Rounding] | None:
    """Return a wide example and torch's results on it.

    Return None if the function has no such example, or torch refuses it: a whole number may be a position, or a length.
    """
    example = function.wide_example(seed)
    if example is None:
        return None
    yardstick = Rounding(function, example, double=False, proven=True)
    try:
        return (example, yardstick) if yardstick.plain else None
    except Exception:  # any function may come
        return None


def judge(function: Function, name: str, found: Array, yardstick: Rounding) -> None:
    """Raise ExportError if an output of the runtime differs from torch by more than rounding.

    Entries that are not finite in torch are ignored: a model has no useful result there.
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
