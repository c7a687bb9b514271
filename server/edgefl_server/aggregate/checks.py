"""Checks of an update's arrays against its form before use: names, dtypes, lengths, values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from edgefl.errors import DIVERGED, UpdateRejected
from edgefl.wire.tensors import Array
from edgefl.wire.update.decode import widen
from edgefl.wire.update.form import CodeEncoding, Form
from edgefl_server.aggregate.accumulator import run_in_threads
from edgefl_server.aggregate.adders import CheckedArrays, readable
from edgefl_server.aggregate.scatter import Integers, Stretches, TierBlocks, reach

_FEW = 8
"""Number of stretches of values below which one thread is faster than several."""

_FETCH = "fetch the tier's bundle again"
_DIVERGED = f"{DIVERGED}; lower the learning rate"


def check_arrays(arrays: Mapping[str, Array], pieces: TierBlocks, threads: int = 1) -> CheckedArrays:
    """Validate an update's arrays against ``pieces`` and return them, ready to add.

    Args:
        arrays: Encoded arrays by name.
        pieces: Compiled layout of the tier's updates.
        threads: Threads that scan the values of a large update.

    Raises:
        UpdateRejected: If a name, dtype, shape or value is wrong; the text contains a remedy.
    """
    check_names_and_types(arrays, pieces)
    update = CheckedArrays(pieces, tuple([readable(arrays[name]) for name in pieces.sources]))
    update = replace(update, largest=_largest(update, threads))
    if not update.largest <= pieces.form.limit:
        _refuse_floats(update.named, pieces.form)
    if "scales" in pieces.expected:
        _check_scales(update)
    if "mask" in pieces.expected:
        _check_mask(arrays["mask"], pieces)
    return update


def check_names_and_types(arrays: Mapping[str, Array], pieces: TierBlocks) -> None:
    """Raise UpdateRejected unless ``arrays`` have the names, dtypes and shapes of ``pieces``."""
    if arrays.keys() != pieces.expected.keys():
        raise _wrong_names(arrays, pieces.expected)
    for name, (dtype, shape) in pieces.expected.items():
        if arrays[name].shape != shape or arrays[name].dtype != dtype:
            raise _wrong_array(name, arrays[name], dtype, shape)


def _wrong_names(arrays: Mapping[str, Array], expected: Mapping[str, object]) -> UpdateRejected:
    missing, extra = sorted(expected.keys() - arrays.keys()), sorted(arrays.keys() - expected.keys())
    return UpdateRejected(
        "wrong-names",
        f"the update should hold the {len(expected)} tensors of its tier; missing: {_few(missing)}; "
        f"not asked for: {_few(extra)}; {_FETCH}",
        missing=missing,
        extra=extra,
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def _wrong_array(name: str, array: Array, dtype: str, shape: tuple[int, ...]) -> UpdateRejected:
    if array.shape != shape:
        return UpdateRejected(
            "wrong-shape",
            f"tensor {name} should have shape {shape}, found {array.shape}; {_FETCH}",
            name=name,
        )
    return UpdateRejected(
        "wrong-dtype", f"tensor {name} should be {dtype}, found {array.dtype}; {_FETCH}", name=name
    )


def _largest(update: CheckedArrays, threads: int) -> float:
    """Return the largest magnitude among the floats of the update; 0 if it has no floats.

    If one is infinite or NaN, the result is infinity or NaN.
    """
    from edgefl_server.aggregate import scans

    found = [0.0]
    for dtype, stretches in update.pieces.stretches.items():
        if dtype == "float32":
            bits = _largest_bits(scans.largest, update, stretches, threads)
            found.append(float(np.uint32(bits).view(np.float32)))
        elif dtype in ("uint16", "float16"):
            half = np.array([_largest_bits(scans.largest_half, update, stretches, threads)], np.uint16)
            found.append(float(widen(half.view(dtype))[0]))
    return found[-1] if len(found) < 3 else float(np.max(found))


def _largest_bits(
    scan: Callable[[npt.NDArray[np.uint64], Integers], int],
    update: CheckedArrays,
    stretches: Stretches,
    threads: int,
) -> int:
    source, skipped, counts = stretches
    starts = update.addresses[source] + skipped
    if len(starts) < _FEW or threads == 1:
        return scan(starts, counts)
    found = [0] * threads

    def look(thread: int) -> None:
        found[thread] = scan(starts[thread::threads].copy(), counts[thread::threads].copy())

    run_in_threads([partial(look, thread) for thread in range(threads)], threads)
    return max(found)


def _refuse_floats(named: Mapping[str, Array], form: Form) -> None:
    """Check the arrays of floats in ``named`` one by one.

    Raises:
        UpdateRejected: For the first array with NaN, infinity, or a value beyond the limit of the encoding ``form``.
    """
    for name, array in named.items():
        if form.sections and name not in ("values", "halves", "scales"):
            continue
        wide = array if array.dtype == np.float32 else widen(array)
        if not np.isfinite(wide).all():
            raise UpdateRejected("not-finite", f"tensor {name} holds NaN or infinity: {_DIVERGED}", name=name)
        if np.abs(wide).max(initial=0.0) > form.limit:
            raise _too_large(f"tensor {name} holds {_kind(form)}s", form, name=name)


def _too_large(what: str, form: Form, **context: object) -> UpdateRejected:
    return UpdateRejected(
        "too-large",
        f"{what} beyond {form.limit:.0f}, the most that a {_kind(form)} may be: {DIVERGED}, or its "
        "data are not normalised; lower the learning rate, or bring the data near 0 to 1",
        limit=form.limit,
        **context,
    )


def _kind(form: Form) -> str:
    return "change" if form.change else "weight"


def _check_scales(update: CheckedArrays) -> None:
    pieces = update.pieces
    scales = update.arrays[pieces.sources.index("scales")]
    if scales.min(initial=0.0) < 0:
        raise UpdateRejected(
            "bad-scale",
            f"scales holds {float(scales.min())}, and a scale is never negative; {_FETCH}",
            scale=float(scales.min()),
        )
    if update.largest * pieces.steepest <= pieces.form.limit:
        return  # no scale allows a larger value
    for work in pieces.works:
        if isinstance(work.encoding, CodeEncoding) and work.encoding.scale is None:
            own = scales[work.scale : work.scale + work.rows]
            largest = reach(work.encoding, float(own.max(initial=0.0)))
            if not largest <= pieces.form.limit:
                raise _too_large(f"a scale of the update allows values up to {largest:.6g},", pieces.form)


def _check_mask(mask: npt.NDArray[np.uint8], pieces: TierBlocks) -> None:
    """Check that the mask of an update selects as many entries of each tensor as required, and sets no bit beyond the
    last entry.

    Raises:
        UpdateRejected: If the mask does not.
    """
    from edgefl_server.aggregate import scans

    names, firsts, lengths, kept = pieces.masked
    end = int(lengths.sum())
    counts = np.empty(len(names), np.int64)
    scans.count_bits(mask.ctypes.data, firsts, lengths, counts)
    for wrong in np.flatnonzero(counts != kept)[:1]:
        name, length, expected = names[wrong], lengths[wrong], kept[wrong]
        raise UpdateRejected(
            "malformed",
            f"the mask keeps {counts[wrong]} of the {length} entries of {name}, not {expected}; {_FETCH}",
            name=name,
        )
    if end % 8 and int(mask[-1]) >> end % 8:
        raise UpdateRejected("malformed", f"the mask has bits set beyond its {end} entries; {_FETCH}")
