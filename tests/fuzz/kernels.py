"""``python -m tests.fuzz.kernels SEED COUNT``: wrong updates through the checks into the compiled sums.

The bytes of each array end where a page ends, and nobody may read the next page: a kernel that reads one byte too many
ends this process. Prints how many updates were refused and how many were added.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import sys

import numpy as np

from benchmarks.fuzz_messages import mutated
from edgefl.errors import EdgeflError
from edgefl.wire import tensors
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import DENSE
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from tests.server.aggregate.test_codec_refusals import FORMS, MASK_BITS, honest
from tests.server.fleet import WEIGHTS

_KEPT: list[mmap.mmap] = []
"""Alive as long as arrays may point there."""


def guarded(array: Array) -> Array:
    """A copy whose last byte is the last that may be read."""
    size = max(1, array.nbytes)
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    _KEPT.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    last = ctypes.c_void_p(start + pages * mmap.PAGESIZE)
    if libc.mprotect(last, ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = np.frombuffer(memory, array.dtype, array.size, pages * mmap.PAGESIZE - array.nbytes)
    copy = copy.reshape(array.shape)
    copy[...] = array
    return copy


def wrong(rng: random.Random, arrays: Arrays, others: list[bytes]) -> Arrays:
    """The arrays as they come out of a file whose bytes were changed, or with single numbers replaced."""
    if rng.random() < 0.3:
        return tensors.load(mutated(rng, tensors.dump(arrays), others), max_bits=MASK_BITS)
    changed = {name: array.copy() for name, array in arrays.items()}
    for array in rng.sample(list(changed.values()), min(2, len(changed))):
        if array.size:
            raw = array.reshape(-1).view(np.uint8)
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    return changed


def main(seed: int, count: int) -> None:
    rng, regions = random.Random(seed), dict.fromkeys(WEIGHTS)
    forms, outcomes = (DENSE, *FORMS.values()), {"refused": 0, "added": 0}
    genuine = {form.codec: dict(WEIGHTS) if form is DENSE else honest(form, "d", 1) for form in forms}
    others = [tensors.dump(arrays) for arrays in genuine.values()]
    for form in forms:
        sums = Aggregator(layout_of(WEIGHTS), weight_limit=count + 1, device="cpu", threads=1)
        for _ in range(count // len(forms)):
            try:
                arrays = wrong(rng, genuine[form.codec], others)
                sums.add(sums.check({n: guarded(a) for n, a in arrays.items()}, regions, form), 1)
                outcomes["added"] += 1
            except EdgeflError:
                outcomes["refused"] += 1
        sums.add(sums.check(genuine[form.codec], regions, form), 1)
        assert all(np.isfinite(array).all() for array in sums.result(WEIGHTS).values()), form.codec
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
