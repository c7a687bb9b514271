"""Identity of a tensor's memory."""

from __future__ import annotations

import torch
from torch import Tensor


def memory_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors in one storage, as views are; the ``id`` of a tensor without a storage."""
    with torch._C.DisableTorchFunction():
        try:
            storage = tensor.untyped_storage()
            return storage.data_ptr() or int(storage._cdata)  # an empty one has no address
        except (NotImplementedError, RuntimeError):
            return id(tensor)
