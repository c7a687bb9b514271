"""Variants of a graph: their compression against the graph's own artifact, and the comparison of their outputs.

::

    variant, frame = compress("blocked", other, chunk, base=model)
    other = decompress(variant, frame, base=model)
    difference = differ(outputs, expected, before)        # "" if they agree
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from edgefl.errors import BundleError
from edgefl.wire.blobs import SHA256, BlobRef, compress_against, decompress_against, describe
from edgefl.wire.limits import Limits
from edgefl.wire.tensors import Array

ALIKE = 5e-2
"""Largest accepted difference of two variants, relative to the change of a state matrix or to the value of another output.

In deep networks with batch norm, rounding amounts to a hundredth of a gradient. The tolerance is therefore loose: it
detects a wrong formula or a wrong memory layout, but no small error.
"""


MOST_VARIANTS = 8
"""Most variants of one graph."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """Alternative artifact of a graph with the same ports. It is faster on some processors; some engines cannot load it.

    Attributes:
        name: Name of the variant.
        blob: Artifact, compressed with the graph's own artifact as dictionary (:func:`decompress`).
        raw: Size of the artifact in bytes.
        sha256: Hexadecimal digest of the artifact.
    """

    name: str
    blob: BlobRef
    raw: int
    sha256: str


def is_sound(variant: Variant) -> bool:
    """Return True if the fields of the variant are valid."""
    named = bool(variant.name) and variant.name.isprintable()
    return (
        named and variant.raw > 0 and not variant.blob.codec and SHA256.fullmatch(variant.sha256) is not None
    )


def compress(name: str, model: bytes, chunk: int, *, base: bytes) -> tuple[Variant, bytes]:
    """Compress a variant against the artifact of its graph.

    Args:
        name: Name of the variant.
        model: Artifact of the variant.
        chunk: Bytes of one chunk.
        base: Artifact of the graph itself.

    Returns:
        Entry for the manifest, and the bytes of its blob.
    """
    frame = compress_against(base, model)
    digest = hashlib.sha256(model).hexdigest()
    return Variant(name=name, blob=describe(frame, chunk), raw=len(model), sha256=digest), frame


def decompress(variant: Variant, frame: bytes, *, base: bytes, limit: int | None = None) -> bytes:
    """Return the artifact of a variant.

    Args:
        variant: Entry of the manifest.
        frame: Bytes of its blob.
        base: Artifact of the graph itself.
        limit: Most bytes of the artifact. None: the default of ``max_blob_bytes``.

    Raises:
        BundleError: The artifact is larger than ``limit``, or does not have the size and digest of ``variant``.
    """
    if not 0 < variant.raw <= (Limits().max_blob_bytes if limit is None else limit):
        raise BundleError(f"variant {variant.name!r} has {variant.raw} bytes, which is no artifact to load")
    model = decompress_against(base, frame, variant.raw)
    if hashlib.sha256(model).hexdigest() != variant.sha256:
        raise BundleError(f"variant {variant.name!r} is not what its manifest names; export the bundle again")
    return model


def differ(found: Mapping[str, Array], expected: Mapping[str, Array], before: Mapping[str, Array]) -> str:
    """Compare the outputs of two runs, of a graph and of its variant, up to rounding.

    Changes of the state are compared, not its values: matrices one by one, vectors all together. A single vector says
    little: the gradient of a bias before a norm is zero in exact arithmetic, and rounding noise in both runs.

    Args:
        found: Outputs of the variant by port name.
        expected: Outputs of the graph by port name.
        before: State from which both runs started, by port name.

    Returns:
        Text that describes the first difference, or "" if the outputs agree.
    """
    if {name: array.shape for name, array in found.items()} != {
        name: array.shape for name, array in expected.items()
    }:
        return "it has other outputs"
    state = [name for name in expected if name.startswith("state.")]
    for names in _group_names(state, expected):
        apart = _norm([_minus(found[name], expected[name]) for name in names])
        moved = _norm([_minus(expected[name], before.get(name, 0.0)) for name in names])
        if not apart <= ALIKE * moved:
            return f"it changes {names[0]} by {moved:.2g} and {apart:.2g} beside that"
    for name in sorted(expected.keys() - {*state}):
        apart, whole = _norm([_minus(found[name], expected[name])]), _norm([_minus(expected[name], 0.0)])
        # A sample on the edge of two classes counts for one or the other.
        one = float(np.array_equal(expected[name], np.rint(expected[name])))
        if not apart <= ALIKE * whole + one:
            return f"{name} differs by {apart:.2g} from {whole:.2g}"
    return ""


def _group_names(state: Sequence[str], arrays: Mapping[str, Array]) -> Iterator[list[str]]:
    """Yield the names of the state arrays that are compared together: each matrix alone, then all vectors."""
    vectors = [name for name in state if arrays[name].ndim < 2]
    yield from ([name] for name in state if arrays[name].ndim >= 2)
    if vectors:
        yield vectors


def _minus(array: Array, other: Array | float) -> Array:
    """Return ``array`` - ``other`` in float64."""
    return np.subtract(array, other, dtype=np.float64)


def _norm(arrays: Iterable[Array]) -> float:
    """Return the Euclidean norm of all entries of ``arrays``."""
    return math.sqrt(sum(float(np.vdot(array, array)) for array in arrays))
