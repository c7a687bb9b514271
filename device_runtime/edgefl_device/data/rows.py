"""Samples by row number, decoded when they are asked for, and what of a bundle they are read by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edgefl.errors import BundleError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.tensors import Array


class Rows(Protocol):
    """Samples by row number: an array, or what stands for one that memory could not hold."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: Any, /) -> Any:
        """The samples at these row numbers (an array) as an array; for a slice, those rows as such a thing."""


@dataclass(frozen=True, eq=False)
class DecodedRows:
    """Samples that are made of ``items`` when they are asked for."""

    items: Sequence[Any]
    decode: Callable[[Any], Array]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: Any, /) -> Any:
        if isinstance(at, slice):
            return DecodedRows(self.items[at], self.decode)
        return np.stack([self.decode(self.items[row]) for row in np.asarray(at).tolist()])


def _no_blob(ref: BlobRef) -> bytes:
    raise BundleError(f"the data are read by blob {ref.sha256[:12]}, and there is no bundle to take it from")


def _no_features(name: str) -> Callable[[Array], Array]:
    raise BundleError(f"the data are read by graph {name!r}, and there is no bundle to take it from")


@dataclass(frozen=True)
class Parts:
    """What of a bundle files are read by: its blobs, and its graphs that make samples of what a file holds."""

    blob: Callable[[BlobRef], bytes] = _no_blob
    graph: Callable[[str], Callable[[Array], Array]] = _no_features


NO_PARTS = Parts()
