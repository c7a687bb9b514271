"""Wrappers of torch as root: what people add to them runs in training, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from edgefl.comparison.compare import compare
from edgefl.errors import ModelError
from edgefl.models.split import split
from tests.comparison.test_compare import SAMPLE, Net, seeded


class Doubling(nn.DataParallel):
    """A forward of its own."""

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = super().forward(*inputs)
        return 2 * out


def hooked(wrapper: nn.Module) -> nn.Module:
    wrapper.register_forward_hook(lambda _, __, out: 2 * out)
    return wrapper


def patched(wrapper: nn.Module) -> nn.Module:
    inside = next(wrapper.children())
    wrapper.forward = lambda x: 2 * inside(x)
    return wrapper


def compiled(module: nn.Module) -> nn.Module:
    wrapper: nn.Module = torch.compile(module, backend="eager")
    return wrapper


REFUSED = pytest.raises(
    ModelError, match=r"OptimizedModule with hooks or a forward of its own.*model\._orig_mod"
)


@pytest.mark.parametrize(
    ("wrap", "factor", "expected"),
    [
        (lambda net: nn.DataParallel(nn.DataParallel(net)), 1.0, nullcontext()),
        (lambda net: compiled(nn.DataParallel(compiled(net))), 1.0, nullcontext()),
        (lambda net: hooked(nn.DataParallel(net)), 2.0, nullcontext()),
        (lambda net: patched(nn.DataParallel(net)), 2.0, nullcontext()),
        (lambda net: compiled(hooked(nn.DataParallel(net))), 2.0, nullcontext()),
        (Doubling, 2.0, nullcontext()),
        (lambda net: hooked(compiled(net)), 2.0, REFUSED),
        (lambda net: patched(compiled(net)), 2.0, REFUSED),
    ],
)
def test_a_wrapper_trains_with_what_was_added_to_it_or_is_refused(
    wrap: Callable[[nn.Module], nn.Module], factor: float, expected: AbstractContextManager[object]
) -> None:
    net = seeded(Net)
    x = torch.randn(5, 4)
    with torch.no_grad():
        wanted = factor * net(x)

    with expected:
        spec = compare(split(wrap(net), sample=SAMPLE, classes=3))
        with torch.no_grad():
            torch.testing.assert_close(spec.module(x), wanted)
