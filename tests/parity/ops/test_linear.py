"""Linear layers and matrix products."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.parity.ops.case import Case, Family, agrees, every

CASES: Family = {
    "Linear": {
        "plain": Case(nn.Linear(6, 4), (3, 6)),
        "no bias": Case(nn.Linear(6, 4, bias=False), (3, 6)),
        "on sequences": Case(nn.Linear(6, 4), (3, 5, 6)),
        "on a vector": Case(nn.Linear(6, 4), (6,)),
    },
    "Bilinear": {"": Case(nn.Bilinear(3, 4, 2), (5, 3), (5, 4))},
    "bmm": {"": Case(torch.bmm, (3, 4, 5), (3, 5, 2))},
    "baddbmm": {
        "": Case(lambda x, a, b: torch.baddbmm(x, a, b, beta=0.5, alpha=2.0), (3, 4, 2), (3, 4, 5), (3, 5, 2))
    },
    "addmm": {"": Case(lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2.0), (4, 2), (4, 5), (5, 2))},
    "matmul": {
        "matrices": Case(torch.matmul, (4, 5), (5, 2)),
        "batches": Case(torch.matmul, (2, 3, 4, 5), (2, 3, 5, 2)),
        "broadcast batches": Case(torch.matmul, (2, 1, 4, 5), (3, 5, 2)),
        "matrix and vector": Case(torch.matmul, (4, 5), (5,)),
        "batch and vector": Case(torch.matmul, (2, 4, 5), (5,)),
        "vector and matrix": Case(torch.matmul, (5,), (5, 3)),
        "vectors": Case(torch.matmul, (5,), (5,)),
    },
    "einsum": {
        "bhqd,bhkd->bhqk": Case(
            lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), (2, 3, 4, 5), (2, 3, 6, 5)
        ),
        "bij,bjk->bik": Case(lambda a, b: torch.einsum("bij,bjk->bik", a, b), (2, 3, 4), (2, 4, 5)),
        "i,j->ij": Case(lambda a, b: torch.einsum("i,j->ij", a, b), (3,), (4,)),
        "bij->bj": Case(lambda a: torch.einsum("bij->bj", a), (2, 3, 4)),
        "ii->i": Case(lambda a: torch.einsum("ii->i", a), (4, 4)),
        "bi,oij,bj->bo": Case(
            lambda a, w, b: torch.einsum("bi,oij,bj->bo", a, w, b), (5, 3), (2, 3, 4), (5, 4)
        ),
    },
    "outer": {"": Case(torch.outer, (3,), (4,))},
    "tensordot": {"": Case(lambda a, b: torch.tensordot(a, b, dims=([1], [0])), (3, 4, 2), (4, 5))},
    "cosine_similarity": {"": Case(F.cosine_similarity, (3, 4), (3, 4))},
    "pairwise distance": {"": Case(nn.PairwiseDistance(), (3, 4), (3, 4))},
}


MORE = ("einsum, bi,oij,bj->bo",)


@pytest.mark.sample(5)
@every(CASES, MORE, differentiable=True)
def test_linear_equals_torch(case: Case, again: bool, form: str) -> None:
    agrees(case.step(again), form)
