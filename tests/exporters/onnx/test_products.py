"""Products between which only ops by entry stand compute on the blocked layout what they did."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import onnx
import pytest
import torch
from torch import Tensor, nn

from edgefl.contract.tensors import Tensors
from edgefl_export.onnx.blocked.images import blocked
from edgefl_export.onnx.model import to_onnx
from edgefl_export.onnx.target import OnnxTarget
from edgefl_export.onnx.values import LAYOUT
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import pointwise, step_of

ROWS, WIDTH, INNER = 64, 128, 1024
"""With 4 samples, 2^25 multiplications a product."""


class Layers(nn.Module):
    """Linear layers between which ``between`` stands, and a head that reads their rows' mean."""

    def __init__(self, between: Callable[[Tensor], Tensor], *sizes: int, bias: bool = True) -> None:
        super().__init__()
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=bias) for pair in pairs)
        self.head, self.between = nn.Linear(sizes[-1], 3), between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.between(layer(x))
        return self.head(self.layers[-1](x).mean(1))  # type: ignore[no-any-return]


def products(model: bytes) -> int:
    """Convolutions of one position, and of one group."""
    nodes = onnx.load_from_string(model).graph.node
    return Counter((node.op_type, node.domain) for node in nodes)["Conv", LAYOUT]


INSIDE: dict[str, tuple[nn.Module, int]] = {
    "gelu": (Layers(nn.GELU(), WIDTH, INNER, WIDTH), 5),
    "relu": (Layers(nn.ReLU(), WIDTH, INNER, WIDTH), 5),
    "no bias": (Layers(nn.Tanh(), WIDTH, INNER, WIDTH, bias=False), 5),
    "by hand": (Layers(lambda x: x * (0.5 * x).sigmoid() + 1.0, WIDTH, INNER, WIDTH), 5),
    "leaky": (Layers(nn.LeakyReLU(), WIDTH, INNER, WIDTH), 5),
    "three layers": (Layers(nn.ReLU(), WIDTH, INNER, INNER, WIDTH), 8),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", INSIDE)
def test_a_step_is_the_same_step(name: str) -> None:
    """The gradient of what goes in is read by nothing, so that a layer has two products or three."""
    module, count = INSIDE[name]
    function = step_of(module, (ROWS, WIDTH))
    own = to_onnx(OnnxTarget().capture(function))

    other = blocked(own, room=math.inf)

    assert other is not None and (products(own), products(other)) == (0, count)
    assert verify(function, other, 1).worst < 1e-5
    assert blocked(own, room=math.inf) == other  # equal bytes each time


OUTSIDE: dict[str, nn.Module] = {
    "its own sum": Layers(
        lambda x: x.relu() + x.detach().sum((0, 1), dtype=torch.float64).float().sum(), WIDTH, INNER, WIDTH
    ),
    "a count of rows": Layers(lambda x: x.relu() + (x > 0).sum((0, 1)).sum(), WIDTH, INNER, WIDTH),
    "columns": Layers(lambda x: x.softmax(-1), WIDTH, INNER, WIDTH),
    "a sum of columns": Layers(lambda x: x * x.mean(-1, keepdim=True), WIDTH, INNER, WIDTH),
    "a number for each column": Layers(lambda x: x * x[:1, :1], WIDTH, INNER, WIDTH),
    "parts": Layers(lambda x: x.relu().unflatten(-1, (2, -1)).mT.flatten(-2), WIDTH, INNER, WIDTH),
    "odd columns": Layers(nn.ReLU(), WIDTH, INNER + 8, WIDTH),
    "few": Layers(nn.ReLU(), WIDTH, INNER // 2, WIDTH),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_needs_its_numbers_in_order_is_left(name: str) -> None:
    own = to_onnx(OnnxTarget().capture(step_of(OUTSIDE[name], (ROWS, WIDTH))))

    assert blocked(own, room=math.inf) is None


def iterated(t: Tensors) -> Tensors:
    """Newton and Schulz's iteration: a product is a factor of another, twice."""
    x = t["weights.w"]
    for _ in range(2):
        square = x @ x.T
        x = 3.4 * x + (2.0 * (square @ square) - 4.8 * square) @ x
    return {"metric.x": x}


def turned_out(t: Tensors) -> Tensors:
    """What two products read is given out with rows and columns exchanged."""
    hidden = (t["batch.x"] @ t["weights.a"].T).relu()
    return {
        "metric.y": hidden @ t["weights.b"].T,
        "metric.z": hidden @ t["weights.c"].T,
        "metric.turned": hidden.T.clone(),
    }


FACTORS: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, tuple[int, ...]]]] = {
    "twice in a product": (iterated, {"weights__w": (512, 512)}),
    "given out": (
        turned_out,
        {
            "batch__x": (512, 128),
            "weights__a": (1024, 128),
            "weights__b": (128, 1024),
            "weights__c": (128, 1024),
        },
    ),
}


@pytest.mark.parametrize("name", FACTORS)
def test_what_is_read_in_its_order_too_is_left(name: str) -> None:
    fn, shapes = FACTORS[name]
    function = pointwise(fn, **shapes)
    own = to_onnx(OnnxTarget().capture(function))

    other = blocked(own, room=math.inf) or own

    assert verify(function, other, 1).worst < 1e-4


def test_products_give_way_to_memory() -> None:
    """Ways into the layout need some beside what is there."""
    module = Layers(nn.Tanh(), *[INNER // 2] * 5)
    own = to_onnx(OnnxTarget().capture(step_of(module, (2 * ROWS, INNER // 2))))

    assert blocked(own) is not None and blocked(own, room=0.5) is None
