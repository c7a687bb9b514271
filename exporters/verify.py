"""Every exported graph runs once in the runtime it is meant for, beside torch, before anybody downloads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from edgefl.programs.contract import Function, Tensors
from edgefl.wire.errors import ExportError

# Float32 sums in another order differ by about 1e-6 of the largest entry; a wrong formula by far more.
RELATIVE = 1e-4
# A tensor that is zero in exact arithmetic (a gradient behind batch norm) is rounding noise in both.
ABSOLUTE = 1e-6
# Where an input lies on the kink of a ReLU, rounding decides on which side, and the gradients of deep models
# differ by up to a percent though both are right. That happens on some examples; a wrong rule fails on all.
KINK = 3e-2
ATTEMPTS = 5


@dataclass(frozen=True)
class Report:
    """Largest error of each output, relative to the largest magnitude of that output in torch.

    ``seed`` is the example that was compared, ``set_aside`` lists examples before it that met a kink.
    """

    function: str
    seed: int
    errors: Mapping[str, float]
    set_aside: tuple[int, ...] = ()

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)


def verify(function: Function, model: bytes, seed: int) -> Report:
    """Run ``model`` in onnxruntime on ``function.example(seed)`` and compare all outputs with torch.

    An example that differs slightly is replaced by the next one, ``ATTEMPTS`` in all. Raises ExportError naming
    the function, the output, the measured error and the tolerance.
    """
    session = _load(function, model)
    for attempt in range(seed, seed + ATTEMPTS):
        try:
            errors = _compare_all(function, session, attempt)
        except ExportError as error:
            kink = error.details.get("relative", 1.0)
            if attempt == seed + ATTEMPTS - 1 or not kink <= KINK:  # type: ignore[operator]
                raise
        else:
            return Report(function.name, attempt, errors, tuple(range(seed, attempt)))
    raise AssertionError("unreachable: the last attempt returns or raises")


def _compare_all(function: Function, session: onnxruntime.InferenceSession, seed: int) -> dict[str, float]:
    example = function.example(seed)
    expected = {name: value.detach().numpy() for name, value in _reference(function, example).items()}
    found = _run(function, session, example)
    if len(found) != len(expected):
        raise ExportError(
            f"the graph of function {function.name!r} has {len(found)} outputs, torch gives {list(expected)}",
            function=function.name,
        )
    return {
        name: _compare(function, name, value, result)
        for (name, value), result in zip(expected.items(), found, strict=True)
    }


def _reference(function: Function, example: Tensors) -> Tensors:
    """Torch's results on copies: a function that updates a buffer in place must not spoil the example."""
    return function({name: value.clone() for name, value in example.items()})


def _load(function: Function, model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = max(1, torch.get_num_threads())
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own unrelated exception types
        raise _refused(function, "load", error) from error


def _run(
    function: Function, session: onnxruntime.InferenceSession, example: Tensors
) -> list[NDArray[np.generic]]:
    try:
        feed = {port.name: example[port.name].numpy() for port in session.get_inputs()}
        return list(session.run(None, feed))
    except Exception as error:
        raise _refused(function, "run", error) from error


def _refused(function: Function, verb: str, error: Exception) -> ExportError:
    return ExportError(
        f"onnxruntime {onnxruntime.__version__} cannot {verb} the graph of function {function.name!r}: {error}",
        function=function.name,
    )


def _compare(
    function: Function, name: str, expected: NDArray[np.generic], found: NDArray[np.generic]
) -> float:
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        raise ExportError(
            f"output {name!r} of function {function.name!r} is {found.dtype}{list(found.shape)} in onnxruntime and "
            f"{expected.dtype}{list(expected.shape)} in torch",
            function=function.name,
            output=name,
        )
    if expected.size == 0:
        return 0.0
    if expected.dtype.kind != "f":
        error, scale, tolerance = float(np.sum(expected != found)), 1.0, 0.0
    else:
        scale = float(np.max(np.abs(expected)))
        error = float(np.max(np.abs(expected.astype(np.float64) - found.astype(np.float64))))
        tolerance = RELATIVE * scale + ABSOLUTE
    if not error <= tolerance:  # also catches NaN
        raise ExportError(
            f"output {name!r} of function {function.name!r} differs from torch by {error:.3g}, allowed are "
            f"{tolerance:.3g} ({RELATIVE:g} of the largest entry, {scale:.3g}); the rule of one of its ops is wrong",
            function=function.name,
            output=name,
            error=error,
            tolerance=tolerance,
            relative=error / max(scale, ABSOLUTE) if expected.dtype.kind == "f" else float("inf"),
        )
    return error / scale if scale else error
