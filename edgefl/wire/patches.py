"""Patches: the difference between two versions of the weights, in codes of eight bits per entry.

A patch is a safetensors blob. Each tensor that training changed is int8 codes under its name, in its shape. Other tensors
that changed (moving statistics) are stored whole. ``/scales`` holds one float32 per coded tensor, by ascending name. With A
the tensor's scale::

    server   d = w - r;  A = max |d|;  code = round(d / (A / 127))  in -127 .. 127
    both     r <- r + (A / 127) * code

A / 127, the product and the sum are each rounded to float32, so both sides have the same r. The rounding error w - r is part
of the next d: error feedback without stored state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from edgefl.errors import BundleError, ProtocolError
from edgefl.wire import tensors
from edgefl.wire.tensors import Array, Arrays

SCALES = "/scales"
"""Name of the scales. No tensor has it: names begin with their unit, or are chosen by the tier's submodel type."""

_MOST = 127


def make_patch(old: Mapping[str, Array], new: Mapping[str, Array], coded: Collection[str]) -> bytes | None:
    """Return the patch that turns ``old`` into an approximation of ``new``, or None if nothing changed.

    Args:
        old: Weights that the device has.
        new: Weights with the same names and shapes.
        coded: Names of the tensors that are sent as int8 codes if they are float32. Others are sent whole.
    """
    codes: Arrays = {}
    scales: list[np.float32] = []
    for name in sorted(name for name in new if name in coded and new[name].dtype == np.float32):
        change = np.asarray(new[name] - old[name])
        scales.append(np.float32(np.abs(change).max(initial=0)))
        codes[name] = _codes(change, scales[-1])
    plain = {name: array for name, array in new.items() if name not in codes and _differs(old[name], array)}
    if not plain and not any(code.any() for code in codes.values()):
        return None
    return tensors.dump({**codes, **plain, SCALES: np.array(scales, np.float32)})


def apply_patch(weights: Mapping[str, Array], data: bytes) -> Arrays:
    """Apply a patch and return the resulting weights. Unchanged tensors are shared with ``weights``.

    Args:
        weights: Weights before the patch.
        data: Bytes of :func:`make_patch`.

    Raises:
        BundleError: The patch is malformed, has other names or shapes than ``weights``, or its result is not finite.
    """
    try:
        changes = tensors.load(data, max_bits=0)
    except ProtocolError as error:
        raise _unfit(error.message) from error
    scales = changes.pop(SCALES, None)
    coded = sorted(name for name, array in changes.items() if array.dtype == np.int8)
    if scales is None or scales.dtype != np.float32 or scales.shape != (len(coded),):
        raise _unfit(f"it should hold {len(coded)} float32 scales")
    if not np.isfinite(scales).all():
        raise _unfit("a scale is not finite")
    for name, array in changes.items():
        _check(name, array, weights)
    steps = dict(zip(coded, scales / np.float32(_MOST), strict=True))
    return {name: _update(name, old, changes.get(name), steps.get(name)) for name, old in weights.items()}


def to_float32(weights: Mapping[str, Array]) -> Arrays:
    """Return the weights with float16 tensors converted to float32, which graphs require. Other tensors are shared."""
    half = np.dtype(np.float16)
    return {n: array.astype(np.float32) if array.dtype == half else array for n, array in weights.items()}


def to_float16(weights: Mapping[str, Array], coded: Collection[str]) -> Arrays:
    """Return the weights with the tensors named in ``coded`` converted from float32 to float16.

    A tensor with an entry beyond float16's range is not converted.
    """
    return {name: _half(array) if name in coded else array for name, array in weights.items()}


def _half(array: Array) -> Array:
    fits = np.abs(array).max(initial=0) <= np.finfo(np.float16).max
    return array.astype(np.float16) if fits and array.dtype == np.float32 else array


def _codes(change: Array, scale: np.float32) -> Array:
    step = scale / np.float32(_MOST)
    if step == 0:
        return np.zeros(change.shape, np.int8)
    return np.asarray(np.clip(np.rint(change / step), -_MOST, _MOST), np.int8)


def _update(name: str, old: Array, new: Array | None, step: np.float32 | None) -> Array:
    """Return one tensor after a patch.

    Args:
        name: Name of the tensor, for the error text.
        old: Tensor before the patch.
        new: Codes or new entries. None: the tensor did not change.
        step: Weight difference per code. None: ``new`` has the entries themselves.

    Raises:
        BundleError: The result is not finite.
    """
    if new is None:
        return old
    if step is None:
        return new
    with np.errstate(over="ignore", invalid="ignore"):  # said below, by name
        moved = np.asarray(old + new.astype(np.float32) * step)
    if not np.isfinite(moved).all():
        raise _unfit(f"tensor {name!r} would hold NaN or infinity")
    return moved


def _differs(old: Array, new: Array) -> bool:
    """Return True if the bytes differ. Unlike ``!=`` this compares NaN as equal, and 0 and -0 as different."""
    return old.tobytes() != new.tobytes()  # also where NaN, or 0 became -0


def _check(name: str, array: Array, weights: Mapping[str, Array]) -> None:
    """Raise BundleError unless ``array``, the entry ``name`` of a patch, fits the tensor of that name in ``weights``."""
    if name not in weights:
        raise _unfit(f"the weights have no tensor {name!r}")
    old = weights[name]
    wanted = np.dtype(np.float32) if array.dtype == np.int8 else array.dtype
    if array.shape != old.shape or old.dtype != wanted:
        raise _unfit(f"tensor {name!r} is {array.dtype} {array.shape}, for one of {old.dtype} {old.shape}")


def _unfit(why: str) -> BundleError:
    return BundleError(f"a patch does not fit the weights it is for: {why}; the server must publish it again")
