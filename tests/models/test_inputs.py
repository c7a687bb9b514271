"""Models with several inputs: the first flows from unit to unit, every unit reads the others again."""

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
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.support.gradients import assert_trains_as_torch

WORDS, LENGTH, WIDTH, CLASSES = 11, 6, 8, 3
TEXT = {
    "ids": TensorSpec((LENGTH,), torch.int64, WORDS),
    "attention_mask": TensorSpec((LENGTH,), torch.int64, 2),
}


class Block(nn.Module):
    """Attention that looks at words only, as everybody writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5 + mask
        return self.norm(x + self.out(scores.softmax(-1) @ v))


class Reader(nn.Module):
    """Words, and which of them are padding, in every block and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = (1.0 - attention_mask[:, None, :].float()) * -1e4
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, hidden)
        weights = attention_mask.unsqueeze(-1).float()
        return self.head((x * weights).sum(1) / weights.sum(1).clamp_min(1.0))


class Towers(nn.Module):
    """Two things of equal standing: who, and what."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(5, WIDTH), nn.Embedding(7, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(2 * WIDTH, 2)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        left, right = self.left(self.user(user)).relu(), self.right(self.item(item)).relu()
        return self.head(torch.cat([left, right], dim=-1))


def reader() -> Reader:
    torch.manual_seed(0)
    return Reader()


def batch(rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=generator)
    return {
        "x": torch.randint(WORDS, (rows, LENGTH), generator=generator),
        "attention_mask": (torch.arange(LENGTH) < lengths).long(),
        "y": torch.randint(CLASSES, (rows,), generator=generator),
    }


def objective_of(spec: ModelSpec, cut: int = 0) -> Objective:
    return Objective.of(OutputSide(spec, cut))


def test_a_cut_carries_one_tensor_and_every_unit_reads_the_mask_again() -> None:
    module = reader()
    spec = split(module, sample=TEXT, classes=CLASSES)

    assert spec.units == ("words", "blocks_0", "blocks_1", "head")
    assert dict(spec.others) == {"attention_mask": TEXT["attention_mask"]}
    assert set(spec.global_names) == set(module.state_dict())
    assert spec.boundary(2) == TensorSpec((LENGTH, WIDTH))
    assert list(objective_of(spec, 2).others(4)) == ["attention_mask"]
    assert not objective_of(spec, 3).others(4)  # the mean over words stays with the block before it


def test_gradients_equal_those_of_the_unedited_module() -> None:
    module, given = reader(), batch()
    spec = split(module, sample=TEXT, classes=CLASSES)
    out = module(given["x"], given["attention_mask"])

    found, _ = assert_trains_as_torch(module, spec, nn.functional.cross_entropy(out, given["y"]), given)

    assert len(found) == len(list(module.parameters()))


@pytest.mark.slow
def test_another_mask_gives_another_loss() -> None:
    spec, given = split(reader(), sample=TEXT, classes=CLASSES), batch()
    objective = objective_of(spec)
    other = {**given, "attention_mask": torch.ones_like(given["attention_mask"])}
    outputs = [objective.predict(spec.weights, each["x"], {}, each) for each in (given, other)]
    losses = [spec.loss.each(out, given["y"]) for out in outputs]
    assert not torch.allclose(*losses)


def test_of_two_towers_the_second_is_computed_where_it_is_read() -> None:
    torch.manual_seed(0)
    module = Towers()
    sample = {"user": TensorSpec((), torch.int64, 5), "item": TensorSpec((), torch.int64, 7)}
    spec = split(module, sample=sample, classes=2)
    x, item = torch.tensor([0, 4, 2]), torch.tensor([6, 1, 3])

    assert spec.units == ("user", "left", "head")
    assert set(spec.global_names) == set(module.state_dict())
    found = objective_of(spec).predict(spec.weights, x, others={"item": item})
    assert torch.allclose(found, module(x, item))


@pytest.mark.slow
def test_the_first_input_may_be_called_x_whatever_forward_calls_it() -> None:
    named = {"x": TEXT["ids"], "attention_mask": TEXT["attention_mask"]}
    assert split(reader(), sample=named, classes=CLASSES).units == ("words", "blocks_0", "blocks_1", "head")


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            {"ids": TEXT["ids"], "mask": TEXT["attention_mask"]},
            "takes no input 'mask'; it takes ids, attention_mask",
        ),
        ({"words": TEXT["ids"]}, "takes no input 'words'"),
    ],
)
def test_inputs_are_called_what_forward_calls_them(sample: dict[str, TensorSpec], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        split(reader(), sample=sample, classes=CLASSES)


# -- the output of a model among all that its forward returns ----------------------------------------------


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
