"""Results of operations on the meta device, each computed once."""

import torch
from torch.nn import functional as F

from edgefl.models.torch_functions.layouts import on_meta_device


def test_cached_results_keep_layout_and_type_and_share_no_memory() -> None:
    x = torch.empty((2, 3, 4), dtype=torch.int64, device="meta").permute(2, 0, 1)

    with on_meta_device():
        first, second, whole = (F.hardswish(x * factor) for factor in (1.0, 1.0, 1))
        written = second.add_(1)

    assert first is not second and written is second and second[1]._base is second
    assert (first.stride(), first.dtype, whole.dtype) == ((x * 1.0).stride(), torch.float32, torch.int64)
