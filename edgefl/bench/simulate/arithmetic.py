"""How many clients a second the processor's arithmetic alone would allow: what no simulator in float32 passes here."""

from __future__ import annotations

import functools
import time

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from edgefl.bench.simulate.models import MODELS
from edgefl.bench.simulate.tasks import Task
from edgefl.system.cores import cores

_SIDE = 2048
_TIMES = 8


def operations(model: nn.Module, x: torch.Tensor) -> int:
    """Multiplications and additions of the convolutions and matrix products of a step on ``x``, forward and backward."""
    counter = FlopCounterMode(display=False)
    with counter:
        model(x).sum().backward()
    return int(counter.get_total_flops())


@functools.cache
def rate() -> float:
    """The most operations a second at which torch multiplies float32 matrices on all cores, measured once."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        left, right = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
        left @ right
        return 2 * _SIDE**3 / min(_seconds(left, right) for _ in range(_TIMES))
    finally:
        torch.set_num_threads(before)


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    began = time.perf_counter()
    left @ right
    return time.perf_counter() - began


def limit(task: Task, shape: tuple[int, ...], rate: float) -> float:
    """Clients a second that make the steps of ``task`` on samples of ``shape``, were there nothing but ``rate``."""
    return rate / (task.steps * operations(MODELS[task.model](), torch.zeros(task.batch, *shape)))
