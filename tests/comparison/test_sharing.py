"""Tensors that have the same memory: torch moves all of them, a graph would move one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.comparison.compare import compare
from edgefl.errors import ModelError
from edgefl.models.split import split
from tests.comparison.test_compare import SAMPLE, Net, seeded


class Tied(Net):
    """A second weight in the middle, of which ``share`` decides in which memory it lies."""

    def __init__(self, share: Callable[[Tied], object]) -> None:
        super().__init__()
        self.inner, self.middle = nn.Linear(6, 6), nn.Linear(6, 6)
        self.view: Tensor | None = None
        self.views: list[Tensor] = []
        share(self)

    def between(self, h: Tensor) -> Tensor:
        h = torch.tanh(self.middle(torch.tanh(self.inner(h))))
        for view in (self.view, *self.views):
            h = h if view is None else F.linear(h, view)
        return h


def same_parameter(net: Tied) -> None:
    net.middle.weight = net.inner.weight


def data(net: Tied) -> None:
    net.middle.weight.data = net.inner.weight.data


def frozen_twin(net: Tied) -> None:
    net.middle.load_state_dict(net.inner.state_dict(), assign=True)
    net.middle.requires_grad_(False)


def transpose(net: Tied) -> None:
    net.middle.weight = nn.Parameter(net.inner.weight.t())


def attribute(net: Tied) -> None:
    net.view = net.inner.weight.data


def item_of_a_list(net: Tied) -> None:
    net.views.append(net.inner.weight.detach())


def array(net: Tied) -> None:
    net.view = torch.from_numpy(net.inner.weight.detach().numpy())


def halves(net: Tied) -> None:
    """Lay both weights into the columns of one tensor, which nobody reads."""
    net.whole = torch.randn(6, 12)
    net.inner.weight.data, net.middle.weight.data = net.whole[:, :6], net.whole[:, 6:]


def constants(net: Tied) -> None:
    """Read views of a tensor that nobody writes."""
    net.register_buffer("fixed", torch.randn(1, 6))
    net.view = net.get_buffer("fixed").expand(6, 6)


def refused(path: str) -> AbstractContextManager[object]:
    return pytest.raises(ModelError, match=rf"found '{path}' in the memory of 'inner.weight'")


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (data, refused("middle.weight")),
        (frozen_twin, refused("middle.weight")),
        (transpose, refused("middle.weight")),
        (attribute, refused("view")),
        (item_of_a_list, refused(r"views\[0\]")),
        (array, refused("view")),
        (same_parameter, nullcontext()),
        (halves, nullcontext()),
        (constants, nullcontext()),
    ],
)
def test_views_of_what_training_moves_are_refused(
    share: Callable[[Tied], None], expected: AbstractContextManager[object]
) -> None:
    module = seeded(lambda: Tied(share))
    places = {name: each.data_ptr() for name, each in module.named_parameters()}

    with expected:
        compare(split(module, sample=SAMPLE, classes=3))

    assert {name: each.data_ptr() for name, each in module.named_parameters()} == places
