"""The output of a model among all that its forward returns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.partition.output import Output
from edgefl.models.split import split

SAMPLE = TensorSpec((4,))


@dataclass
class Answer:
    hidden: Tensor
    logits: Tensor


class Pair(NamedTuple):
    start: Tensor
    end: Tensor


class Cache:
    """Nothing that torch knows."""

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept


class Net(nn.Module):
    def __init__(self, returned: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.returned = returned

    def forward(self, x: Tensor) -> object:
        hidden = torch.relu(self.first(x))
        return self.returned(hidden, self.second(hidden))


# What is returned of the hidden layer and the logits, the key, and which of the two is the output.
CASES: dict[str, tuple[Callable[[Tensor, Tensor], object], Output, int]] = {
    "mapping": (lambda h, z: {"hidden": h, "logits": z}, None, 1),
    "mapping without logits": (lambda h, z: OrderedDict(ids=h.argmax(1), scores=z), None, 1),
    "key": (lambda h, z: {"hidden": h, "logits": z}, "hidden", 0),
    "dataclass": (Answer, None, 1),
    "attribute": (Answer, "hidden", 0),
    "named tuple": (lambda h, z: Pair(z, h), "end", 0),
    "tuple": (lambda h, z: (z, h), None, 1),
    "position": (lambda h, z: (h, z), 1, 1),
    "from the end": (lambda h, z: [h, z], -1, 1),
    "nested": (lambda h, z: ((None, [z]), h), None, 1),
    "cache": (lambda h, z: {"past": Cache(h), "scores": z}, None, 1),
    "cache first": (lambda h, z: (Cache(h), z), None, 1),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES)
def test_the_output_is_found(case: str) -> None:
    returned, output, which = CASES[case]
    module = Net(returned)
    cuts = None if len(case) % 2 else ("first",)  # both ways to cut a module
    spec = split(module, cuts, sample=SAMPLE, classes=(6, 3)[which], output=output)

    x = torch.randn(5, 4)
    hidden = torch.relu(module.first(x))
    torch.testing.assert_close(spec.module(x), (hidden, module.second(hidden))[which])
    unused = {"second.weight", "second.bias"} if which == 0 else set()
    assert set(spec.global_names) == set(module.state_dict()) - unused


def test_the_last_child_of_a_sequential_may_return_more_than_a_tensor() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Net(lambda h, z: {"hidden": h, "logits": z}))
    spec = split(layers, sample=SAMPLE, classes=3)
    x = torch.randn(5, 4)
    torch.testing.assert_close(spec.module(x), layers(x)["logits"])
    assert spec.units == ("0", "1", "2") and set(spec.weights) == set(layers.state_dict())
    torch.testing.assert_close(
        split(layers, sample=SAMPLE, classes=6, output="hidden").module(x), layers(x)["hidden"]
    )


class Configured(Net):
    """Keeps a cache unless its configuration says otherwise, and counts its texts, which no graph could."""

    def __init__(self) -> None:
        super().__init__(lambda h, z: {"logits": z})
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, x: Tensor) -> object:
        if self.config.use_cache:
            assert int(x.sum()) >= 0
        return super().forward(x)


def test_a_model_with_a_configuration_keeps_no_cache_while_it_is_cut() -> None:
    module = Configured()
    assert split(module, sample=SAMPLE, classes=3).units == ("first", "second")
    assert module.config.use_cache


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("returned", "output", "message"),
    [
        (
            lambda h, z: {"hidden": h},
            "logits",
            r"no tensor 'logits'; it returns dict with hidden \(batch, 6\): name one",
        ),
        (
            lambda h, z: (h, z),
            2,
            r"no tensor 2; it returns tuple with 0 \(batch, 6\), 1 \(batch, 3\): name one",
        ),
        (lambda h, z: z, "logits", r"no tensor 'logits'; it returns a tensor: leave `output` out"),
        (lambda h, z: Cache(z), None, "no floating tensor; it returns Cache: return one"),
        (
            lambda h, z: {"best": z.argmax(1)},
            None,
            r"no floating tensor; it returns dict with best \(batch\): name one",
        ),
    ],
)
def test_a_missing_output_is_reported_with_those_that_exist(
    returned: Callable[[Tensor, Tensor], object], output: Output, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        split(Net(returned), sample=SAMPLE, classes=3, output=output)
