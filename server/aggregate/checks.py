"""Whether an update's arrays are what its form says, before any of them is read: names, dtypes, lengths, values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgefl.wire.errors import UpdateRejected
from edgefl.wire.tensors import Array
from edgefl.wire.update.decode import widen
from edgefl.wire.update.form import Codes, Form, Sparse
from server.aggregate import scans
from server.aggregate.accumulator import Checked
from server.aggregate.scatter import Pieces, reach

_FETCH = "fetch the tier's bundle again"
_DIVERGED = "training diverged on this device; lower the learning rate"


def checked(arrays: Mapping[str, Array], pieces: Pieces) -> Checked:
    """The update, ready to add. UpdateRejected, with a reason and what to do, if anything is not as it should be."""
    _check_names(arrays, pieces.expected)
    for name, (dtype, shape) in pieces.expected.items():
        _check_array(name, arrays[name], dtype, shape)
    update = Checked(
        pieces, tuple(np.require(arrays[name], requirements=["C", "A"]) for name in pieces.sources)
    )
    if not pieces.form.sections:
        for name, array in update.named.items():
            _check_floats(name, array, pieces.form)
        return update
    named = update.named
    for name in ("values", "halves", "scales"):
        if name in named:
            _check_floats(name, named[name], pieces.form)
    if "scales" in named:
        _check_scales(named["scales"], pieces)
    if "mask" in named:
        _check_mask(named["mask"], pieces)
    return update


def _check_names(arrays: Mapping[str, Array], expected: Mapping[str, object]) -> None:
    missing, extra = sorted(expected.keys() - arrays.keys()), sorted(arrays.keys() - expected.keys())
    if missing or extra:
        raise UpdateRejected(
            "wrong-names",
            f"the update should hold the {len(expected)} tensors of its tier; missing: {_few(missing)}; "
            f"not asked for: {_few(extra)}; {_FETCH}",
            missing=missing,
            extra=extra,
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def _check_array(name: str, array: Array, dtype: str, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise UpdateRejected(
            "wrong-shape",
            f"tensor {name} should have shape {shape}, found {array.shape}; {_FETCH}",
            name=name,
        )
    if array.dtype != dtype:
        raise UpdateRejected(
            "wrong-dtype", f"tensor {name} should be {dtype}, found {array.dtype}; {_FETCH}", name=name
        )


def _check_floats(name: str, array: Array, form: Form) -> None:
    if _within(array, form.limit):
        return
    if not np.isfinite(array if array.dtype == np.float32 else widen(array)).all():
        raise UpdateRejected("not-finite", f"tensor {name} holds NaN or infinity: {_DIVERGED}", name=name)
    raise _too_large(f"tensor {name} holds {_kind(form)}s", form, name=name)


def _too_large(what: str, form: Form, **context: object) -> UpdateRejected:
    return UpdateRejected(
        "too-large",
        f"{what} beyond {form.limit:.0f}, the most that a {_kind(form)} may be: training diverged on this device, or its "
        "data are not normalised; lower the learning rate, or bring the data near 0 to 1",
        limit=form.limit,
        **context,
    )


def _kind(form: Form) -> str:
    return "change" if form.change else "weight"


def _within(array: Array, limit: float) -> bool:
    """Whether all values are finite and within the limit. 16 bits are compared as they are: magnitudes sort alike."""
    if array.dtype == np.float32:
        return bool(scans.within(array.ctypes.data, array.size, limit))
    return bool(scans.halves_within(array.ctypes.data, array.size, _pattern(limit, array.dtype)))


def _pattern(limit: float, dtype: np.dtype[Any]) -> int:
    """The 16 bits of the largest number of ``dtype`` (uint16: bfloat16) that is finite and at most ``limit``."""
    if dtype == np.uint16:
        return int(np.float32(limit).view(np.uint32)) >> 16
    return int(np.float16(min(limit, float(np.finfo(np.float16).max))).view(np.uint16))


def _check_scales(scales: npt.NDArray[np.float32], pieces: Pieces) -> None:
    if (scales < 0).any():
        raise UpdateRejected(
            "bad-scale",
            f"scales holds {float(scales.min())}, and a scale is never negative; {_FETCH}",
            scale=float(scales.min()),
        )
    for work in pieces.works:
        if isinstance(work.encoding, Codes) and work.encoding.scale is None:
            own = scales[work.scale : work.scale + work.rows]
            largest = reach(work.encoding, float(own.max(initial=0.0)))
            if not largest <= pieces.form.limit:
                raise _too_large(f"a scale of the update stands for {largest:.6g},", pieces.form)


def _check_mask(mask: npt.NDArray[np.uint8], pieces: Pieces) -> None:
    """Each tensor has exactly as many bits set as the form keeps, and none is set beyond the last."""
    spans = list(_spans(pieces))
    lengths = np.array([length for _, length, _ in spans])
    firsts = np.cumsum(lengths) - lengths
    end = int(lengths.sum())
    counts = np.empty(len(spans), np.int64)
    scans.count_bits(mask.ctypes.data, firsts, lengths, counts)
    for (name, length, expected), count in zip(spans, counts.tolist(), strict=True):
        if count != expected:
            raise UpdateRejected(
                "malformed",
                f"the mask keeps {count} of the {length} entries of {name}, not {expected}; {_FETCH}",
                name=name,
            )
    if end % 8 and int(mask[-1]) >> end % 8:
        raise UpdateRejected("malformed", f"the mask has bits set beyond its {end} entries; {_FETCH}")


def _spans(pieces: Pieces) -> Iterator[tuple[str, int, int]]:
    """(tensor, entries, how many are kept) of the mask, in its order."""
    for section in pieces.form.sections:
        if isinstance(section.encoding, Sparse):
            for name in section.names:
                yield name, pieces.entries[name], section.encoding.kept(pieces.entries[name])
