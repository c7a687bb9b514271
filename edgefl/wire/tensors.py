"""Named tensors as bytes: safetensors, with the checks an untrusted sender needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as _load
from safetensors.numpy import save as _save

from edgefl.wire.errors import ProtocolError

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


def dump(arrays: Mapping[str, Array]) -> bytes:
    """Safetensors bytes; equal arrays give equal bytes, whatever the order of the mapping."""
    # np.asarray, because np.ascontiguousarray turns a scalar into an array of one.
    ordered = {name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}
    return bytes(_save(ordered))


def load(data: bytes) -> Arrays:
    """The arrays of :func:`dump`; ProtocolError if the bytes are not valid safetensors."""
    try:
        return dict(_load(data))
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ProtocolError(
            f"tensor bytes are not valid safetensors ({error}); send the blob again"
        ) from error
