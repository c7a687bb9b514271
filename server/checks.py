"""Whether an update's arrays are what its form says, before any of them is read: names, dtypes, lengths, values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from edgefl.codecs.decode import widen
from edgefl.codecs.form import Codes, Sparse
from edgefl.wire.errors import UpdateRejected
from edgefl.wire.tensors import Array
from server import kernels
from server.accumulator import Checked
from server.pieces import Pieces

VALUE_LIMIT = 2.0**20
"""Largest magnitude an update may hold. No trained network comes near it; with it int64 cannot overflow."""

_MOST = {"float16": 0x7BFF, "uint16": 0x4980}
"""Patterns of the largest finite float16, and of VALUE_LIMIT as bfloat16."""

_FETCH = "fetch the tier's bundle again"
_DIVERGED = "training diverged on this device; lower the learning rate"


def checked(arrays: Mapping[str, Array], pieces: Pieces) -> Checked:
    """The update, ready to add. UpdateRejected, with a reason and what to do, if anything is not as it should be."""
    expected = _expected(pieces)
    _check_names(arrays, expected)
    for name, (dtype, shape) in expected.items():
        _check_array(name, arrays[name], dtype, shape)
    update = Checked(pieces, tuple(np.require(arrays[name], requirements="CA") for name in pieces.sources))
    if not pieces.form.sections:
        for name, array in update.named.items():
            _check_floats(name, array)
        return update
    named = update.named
    for name in ("values", "halves", "scales"):
        if name in named:
            _check_floats(name, named[name])
    if "scales" in named:
        _check_scales(named["scales"], pieces)
    if "mask" in named:
        _check_mask(named["mask"], pieces)
    return update


def _expected(pieces: Pieces) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of each array."""
    if not pieces.form.sections:
        return {name: ("float32", shape) for name, shape in pieces.shapes.items()}
    told = pieces.form.arrays(pieces.entries)
    return {name: (dtype, (length,)) for name, (dtype, length) in told.items()}


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


def _check_floats(name: str, array: Array) -> None:
    if _within(array):
        return
    if not np.isfinite(array if array.dtype == np.float32 else widen(array)).all():
        raise UpdateRejected("not-finite", f"tensor {name} holds NaN or infinity: {_DIVERGED}", name=name)
    raise UpdateRejected(
        "too-large",
        f"tensor {name} holds values beyond {VALUE_LIMIT:.0f}: {_DIVERGED}",
        name=name,
        limit=VALUE_LIMIT,
    )


def _within(array: Array) -> bool:
    """Whether all values are finite and within the limit. 16 bits are compared as they are: magnitudes sort alike."""
    if array.dtype == np.float32:
        return bool(kernels.within(array.ctypes.data, array.size, VALUE_LIMIT))
    return bool(kernels.halves_within(array.ctypes.data, array.size, _MOST[array.dtype.name]))


def _check_scales(scales: npt.NDArray[np.float32], pieces: Pieces) -> None:
    if (scales < 0).any():
        raise UpdateRejected(
            "bad-scale",
            f"scales holds {float(scales.min())}, and a scale is never negative; {_FETCH}",
            scale=float(scales.min()),
        )
    for work in pieces.works:
        if isinstance(work.encoding, Codes) and work.encoding.scale is None:
            reach = max(abs(level) for level in work.encoding.levels)
            largest = float(scales[work.scale : work.scale + work.rows].max(initial=0.0)) * reach
            if largest > VALUE_LIMIT:
                raise UpdateRejected(
                    "too-large",
                    f"a scale of the update stands for {largest}, beyond {VALUE_LIMIT:.0f}: {_DIVERGED}",
                    limit=VALUE_LIMIT,
                )


def _check_mask(mask: npt.NDArray[np.uint8], pieces: Pieces) -> None:
    """Each tensor has exactly as many bits set as the form keeps, and none is set beyond the last."""
    spans = list(_spans(pieces))
    lengths = np.array([length for _, length, _ in spans])
    firsts = np.cumsum(lengths) - lengths
    end = int(lengths.sum())
    found = np.empty(len(spans), np.int64)
    kernels.count_bits(mask.ctypes.data, firsts, lengths, found)
    for (name, length, kept), count in zip(spans, found.tolist(), strict=True):
        if count != kept:
            raise UpdateRejected(
                "malformed",
                f"the mask keeps {count} of the {length} entries of {name}, not {kept}; {_FETCH}",
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
