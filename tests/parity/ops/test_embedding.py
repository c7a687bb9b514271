"""Rows picked by integer inputs: gradients add up where an index occurs more than once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from edgefl.models.torch_functions.control_flow import TraceableMode
from edgefl_export.decompositions.indexing import index_put
from tests.parity.ops.case import LABELS, Case, Family, Labels, agrees, every

TOKENS = Labels((4, 5))  # twenty indices in [0, 4): each occurs several times


class Bag(nn.Module):
    """A layer as a model has it that is compiled."""

    def __init__(self, layer: nn.EmbeddingBag) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor | None) -> Tensor:
        with TraceableMode():
            return self.layer(*inputs)


class WeightedBag(nn.Module):
    """Each row has a weight, which gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = Bag(nn.EmbeddingBag(7, 3, mode="sum"))

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        return self.bag(tokens, None, weights)


class OffsetBag(nn.Module):
    """Three bags of six tokens, the middle one empty."""

    def __init__(self, mode: str, *, last: bool = False) -> None:
        super().__init__()
        self.ends = (6,) if last else ()
        self.bag = Bag(nn.EmbeddingBag(7, 3, mode=mode, include_last_offset=last))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bag(tokens, torch.tensor([0, 4, 4, *self.ends]))


CASES: Family = {
    "Embedding": {
        "sequences": Case(nn.Embedding(LABELS, 3), TOKENS),
        "one axis": Case(nn.Embedding(7, 3), Labels((6,))),
        "unused rows": Case(nn.Embedding(9, 3), TOKENS),
        "padding index": Case(nn.Embedding(LABELS, 3, padding_idx=1), TOKENS),
        "many rows": Case(nn.Embedding(300, 3), TOKENS),
        "many rows, padding index, scaled by frequency": Case(
            nn.Embedding(300, 3, padding_idx=1, scale_grad_by_freq=True), TOKENS
        ),
        "int32 indices": Case(nn.Embedding(LABELS, 3), Labels((4, 5), torch.int32)),
        "scaled by frequency": Case(nn.Embedding(LABELS, 3, scale_grad_by_freq=True), TOKENS),
    },
    "EmbeddingBag": {
        "mean": Case(Bag(nn.EmbeddingBag(7, 3)), TOKENS),
        "sum, weighted": Case(WeightedBag(), TOKENS, (4, 5)),
        "max": Case(Bag(nn.EmbeddingBag(7, 3, mode="max")), TOKENS),
        "mean, padding index": Case(Bag(nn.EmbeddingBag(7, 3, padding_idx=1)), TOKENS),
        "max, padding index": Case(Bag(nn.EmbeddingBag(7, 3, mode="max", padding_idx=1)), TOKENS),
        "sum, offsets": Case(OffsetBag("sum"), Labels((6,))),
        "mean, offsets with the last": Case(OffsetBag("mean", last=True), Labels((6,))),
        "max, offsets": Case(OffsetBag("max"), Labels((6,))),
    },
    "gather": {
        "rows": Case(lambda x, i: x.gather(0, i), (LABELS, 5), Labels((7, 5))),
        "columns": Case(lambda x, i: x.gather(1, i), (3, LABELS), Labels((3, 6))),
        "take_along_dim": Case(lambda x, i: x.take_along_dim(i, 1), (3, LABELS), Labels((3, 6))),
    },
    "scatter": {
        "add": Case(lambda x, y, i: x.scatter_add(1, i, y), (3, LABELS), (3, 6), Labels((3, 6))),
        "index_add": Case(lambda x, y, i: x.index_add(0, i, y), (LABELS, 3), (6, 3), Labels((6,))),
    },
    "index_select": {
        "rows": Case(lambda x, i: x.index_select(0, i), (LABELS, 5), Labels((7,))),
        "columns": Case(lambda x, i: x.index_select(1, i), (3, LABELS, 2), Labels((7,))),
    },
    "indexing": {
        "x[i]": Case(lambda x, i: x[i], (LABELS, 5), Labels((3, 2))),
        "x[i], many rows": Case(lambda x, i: x[i], (200, 5), Labels((3, 2))),
        "x[:, i, j], many rows": Case(
            lambda x, i, j: x[:, i, j], (3, 15, 15, 2), Labels((6,)), Labels((2, 1))
        ),
        "counted from the end": Case(lambda x, i: x[:, i - LABELS], (3, LABELS, 2), Labels((6,))),
        "x[:, i]": Case(lambda x, i: x[:, i], (3, LABELS, 2), Labels((6,))),
        "x[i, j]": Case(lambda x, i, j: x[i, j], (LABELS, LABELS, 2), Labels((6,)), Labels((6,))),
        "x[i, :, j]": Case(lambda x, i, j: x[i, :, j], (LABELS, 3, LABELS), Labels((6,)), Labels((6,))),
        "x[arange, y]": Case(lambda x, y: x[torch.arange(3), y], (3, LABELS), Labels((3,))),
        "constant list": Case(lambda x: x[:, [0, 2, 2]], (3, 4)),
        "negative constant": Case(lambda x: x[:, [-1, 0, -1]], (3, 4)),
    },
    "index_put": {
        "written": Case(lambda x, y: x.index_put((torch.tensor([2, 0]),), y), (LABELS, 3), (2, 3)),
        "written by int32": Case(
            lambda x, y: x.index_put((torch.tensor([2, 0], dtype=torch.int32),), y), (LABELS, 3), (2, 3)
        ),
        "added": Case(
            lambda x, y, i: x.index_put((i,), y, accumulate=True), (LABELS, 3), (6, 3), Labels((6,))
        ),
    },
}


MORE = (
    "EmbeddingBag, max, padding index",
    "EmbeddingBag, mean, offsets with the last",
    "EmbeddingBag, max, offsets",
    "index_put, added",
    "index_put, written by int32",
)


@pytest.mark.sample(5)
@every(CASES, MORE)
def test_embedding_equals_torch(case: Case, again: bool, form: str) -> None:
    agrees(case.step(again), form)


def test_one_value_stands_where_the_index_has_its_mask() -> None:
    x, indices = torch.arange(9.0).view(3, 3), [torch.tensor([True, False, True]), None]

    found = index_put(x, indices, torch.tensor(2.0))

    assert torch.equal(found, torch.ops.aten.index_put(x, indices, torch.tensor(2.0)))
