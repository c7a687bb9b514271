"""The judge itself: it must be able to say each of its words, and a campaign must survive what it judges."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import fuzz
from tests.support.case import Case, Outcome, batches, mean_cross_entropy
from tests.support.isolated import isolated
from tests.support.oracle import judge, named_tensors, widen


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))


CASE = Case("dropping", "judge", "trains", dropping)


class Forked(nn.Module):
    """Another module for torch than for the compiler: the second one made differs."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Forked.made += 1
        torch.manual_seed(0)
        self.a, self.scale = nn.Linear(8, 3), 1.0 if Forked.made == 1 else 1.01

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) * self.scale
        return out


def test_draws_of_the_device_are_given_to_torch() -> None:
    assert judge(CASE) == Outcome("agrees")


def test_views_of_one_weight_stay_so_in_float64() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    module[1].weight = nn.Parameter(module[0].weight.t())
    before = named_tensors(module)

    widen(module, torch.float64)

    module[0].weight.data[0, 1] = before["0.weight"][0, 1] = 7.0
    for name, each in named_tensors(module).items():
        wanted = before["0.weight"].t() if name == "1.weight" else before[name]
        assert torch.equal(each, wanted.to(each.dtype)), name
    assert module[0].weight.dtype == module[2].running_mean.dtype == torch.float64


class Drawing(nn.Module):
    """Draws by ``draw`` between two layers, twice."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.draw = nn.Linear(8, 8), nn.Linear(8, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = self.b(self.draw(self.draw(h)) if self.training else h)
        return out


def attend(x: Tensor) -> Tensor:
    rows = x.unflatten(1, (4, 2)).unsqueeze(1)
    return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.3, is_causal=True).flatten(1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.7),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
        lambda x: x * (torch.rand(len(x), 1, dtype=x.dtype) + 0.7).floor(),
        lambda x: x + torch.rand_like(x),
        lambda x: x * torch.zeros_like(x).uniform_(0.5, 2.0),
        lambda x: x * x.new_empty(x.shape).uniform_(to=2.0),
        attend,
    ],
    ids=["bernoulli_", "bernoulli", "rand", "rand_like", "uniform_", "uniform_ to", "attention"],
)
def test_every_kind_of_draw_is_given_to_torch(draw: Callable[[Tensor], Tensor]) -> None:
    assert judge(Case("drawing", "judge", "trains", lambda: Drawing(draw))) == Outcome("agrees")


class Spare(nn.Module):
    """Two equal norms, of which the first is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spare, self.norm, self.head = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


def test_an_unused_tensor_is_not_compared_with_one_of_equal_values() -> None:
    assert judge(Case("spare", "judge", "trains", Spare)) == Outcome("agrees")


def test_a_loss_that_differs_by_one_percent_is_wrong() -> None:
    outcome = judge(replace(CASE, loss_fn=lambda out, y: 1.01 * mean_cross_entropy(out, y)))

    assert outcome.word == "wrong" and outcome.tensor
    assert outcome.error == pytest.approx(0.01, rel=0.2)


def test_a_module_that_differs_by_one_percent_is_wrong() -> None:
    assert judge(Case("forked", "judge", "trains", Forked)).word == "wrong"


def test_labels_hold_every_class_in_unequal_counts() -> None:
    for _, y in batches(CASE, 3, 6):
        counts = torch.bincount(y, minlength=3)
        assert counts.min() > 0 and counts.max() > counts.min()


def crash() -> Outcome:
    os._exit(3)


def hang() -> Outcome:
    time.sleep(60)
    return Outcome("agrees")


def fail() -> Outcome:
    return Outcome("agrees", str(torch.zeros(2) @ torch.zeros(3)))


def test_a_crash_and_a_hang_end_only_their_own_case() -> None:
    tasks = [("crash", crash), ("hang", hang), ("error", fail), ("fine", lambda: Outcome("agrees"))]
    words = {name: outcome.word for name, outcome in isolated(tasks, jobs=2, limit_s=2.0)}

    assert words == {"crash": "raised", "hang": "raised", "error": "undecided", "fine": "agrees"}


@pytest.mark.slow
def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    stage = fuzz.Stage("compared", 4, lambda seed: Outcome("agrees" if seed else "refused", "advice"))
    fuzz.run(stage, results, jobs=1, limit_s=60.0)
    whole = results.read_text().splitlines()
    # The third line was cut off by a power cut, and the second is another outcome than a new run would give.
    second = json.dumps({**json.loads(whole[1]), "word": "wrong"})
    results.write_text("\n".join((whole[0], second, whole[2][:20])) + "\n")
    fuzz.run(stage, results, jobs=1, limit_s=60.0)

    lines = fuzz.read(results)
    assert [lines["compared", seed]["word"] for seed in range(4)] == ["refused", "wrong", "agrees", "agrees"]
    assert "| compared | 0 to 3 | 4 | 2 | 1 | 1 | 0 | 0 |" in fuzz.page(lines)
