"""Activations, and functions that draw random numbers, which are inputs of the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.models.torch_functions.random_inputs import RandomInputMode
from tests.parity.ops.case import Case, Family, Uniform, agrees, every

ROWS = (4, 6)


def drawing(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """``function``, which draws once, with its numbers as an argument."""

    def read(x: Tensor, uniform: Tensor) -> Tensor:
        with RandomInputMode.from_numbers(("u",), {"u": uniform}):
            return function(x)

    return read


CASES: Family = {
    "ReLU": {"": Case(nn.ReLU(), ROWS), "in place": Case(lambda x: F.relu_(x * 1.0), ROWS)},
    "ReLU6": {"": Case(lambda x: F.relu6(x * 5), ROWS)},
    "LeakyReLU": {"": Case(nn.LeakyReLU(0.1), ROWS)},
    "PReLU": {"one slope": Case(nn.PReLU(), ROWS), "slope per channel": Case(nn.PReLU(3), (2, 3, 4, 5))},
    "ELU": {"": Case(nn.ELU(), ROWS), "own alpha": Case(nn.ELU(0.7), ROWS)},
    "SELU": {"": Case(nn.SELU(), ROWS)},
    "CELU": {"": Case(nn.CELU(0.8), ROWS)},
    "GELU": {"exact": Case(nn.GELU(), ROWS), "tanh": Case(nn.GELU("tanh"), ROWS)},
    "SiLU": {"": Case(nn.SiLU(), ROWS), "in place": Case(lambda x: F.silu(x * 1.0, inplace=True), ROWS)},
    "Mish": {"": Case(nn.Mish(), ROWS)},
    "Sigmoid": {"": Case(nn.Sigmoid(), ROWS)},
    "LogSigmoid": {"": Case(nn.LogSigmoid(), ROWS)},
    "Tanh": {"": Case(nn.Tanh(), ROWS)},
    "Hardtanh": {"": Case(nn.Hardtanh(), ROWS), "own limits": Case(nn.Hardtanh(-0.3, 0.7), ROWS)},
    "Hardsigmoid": {"": Case(lambda x: F.hardsigmoid(x * 3), ROWS)},
    "Hardswish": {"": Case(lambda x: F.hardswish(x * 3), ROWS)},
    "Softplus": {
        "": Case(nn.Softplus(), ROWS),
        "own beta and threshold": Case(nn.Softplus(beta=2.0, threshold=1.0), ROWS),
    },
    "Softsign": {"": Case(nn.Softsign(), ROWS)},
    "Tanhshrink": {"": Case(nn.Tanhshrink(), ROWS)},
    "Hardshrink": {"": Case(nn.Hardshrink(0.3), ROWS)},
    "Softshrink": {"": Case(nn.Softshrink(0.3), ROWS)},
    "Threshold": {"": Case(nn.Threshold(0.2, -1.0), ROWS)},
    "GLU": {"": Case(nn.GLU(dim=1), ROWS)},
    "Softmax": {
        "last axis": Case(nn.Softmax(dim=-1), ROWS),
        "first axis": Case(nn.Softmax(dim=0), ROWS),
        "channels": Case(nn.Softmax(dim=1), (2, 3, 4, 5)),
    },
    "LogSoftmax": {
        "last axis": Case(nn.LogSoftmax(dim=-1), ROWS),
        "channels": Case(nn.LogSoftmax(dim=1), (2, 3, 4, 5)),
    },
    "logsumexp": {"": Case(lambda x: torch.logsumexp(x, 1), ROWS)},
    "Dropout": {
        "training": Case(drawing(nn.Dropout(0.3)), ROWS, Uniform(ROWS)),
        "inference": Case(nn.Dropout(0.3).eval(), ROWS),
    },
    "Dropout1d": {"training": Case(drawing(nn.Dropout1d(0.3)), (2, 3, 4), Uniform((2, 3, 1)))},
    "AlphaDropout": {"training": Case(drawing(nn.AlphaDropout(0.3)), ROWS, Uniform(ROWS))},
    "RReLU": {"training": Case(drawing(nn.RReLU()), ROWS, Uniform(ROWS))},
    "rand_like": {"": Case(drawing(lambda x: x * torch.rand_like(x)), ROWS, Uniform(ROWS))},
    "randn_like": {"": Case(drawing(lambda x: x * torch.randn_like(x)), ROWS, Uniform((2, *ROWS)))},
    "bernoulli": {"": Case(drawing(lambda x: x * torch.full_like(x, 0.4).bernoulli()), ROWS, Uniform(ROWS))},
    "exponential_": {
        "": Case(drawing(lambda x: x + torch.empty_like(x).exponential_()), ROWS, Uniform(ROWS))
    },
}


MORE = ("PReLU, slope per channel", "Softmax, channels", "GELU, tanh", "ReLU, in place")


@pytest.mark.sample(12)
@every(CASES, MORE, differentiable=True)
def test_activation_equals_torch(case: Case, again: bool, form: str) -> None:
    agrees(case.step(again), form)
