"""What a module puts aside while it is traced is of no use to the next run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.programs.baselines.sgd import sgd
from exporters.capture.trace import capture

SAMPLE = TensorSpec((4,))


class Biased(nn.Module):
    """A bias that is gathered once for inference, as LeViT and TinyViT do; positions of the last length, as ConViT has."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Parameter(torch.randn(6)), nn.Linear(4, 4)
        self.cache: dict[str, Tensor] = {}

    def _bias(self) -> Tensor:
        if self.training:
            return self.table[:4]
        if "bias" not in self.cache:
            self.cache["bias"] = self.table[:4] * 1.0
        return self.cache["bias"]

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "positions") or len(self.positions) != x.shape[1]:
            self.positions = torch.arange(x.shape[1]) * 0.5
        return torch.tanh(self.fc(x) + self._bias() + self.positions)


def test_an_exported_evaluation_reads_the_weights_that_it_is_given() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Biased(), nn.Linear(4, 3))
    spec = split(model, "auto", sample=SAMPLE, classes=3)
    evaluate = sgd(Objective(spec.module, spec.sample), batch=3).evaluate

    for seed in range(2):
        given = evaluate.example(seed)
        wanted = evaluate(given)
        torch.testing.assert_close(capture(evaluate)(given), wanted)
        torch.testing.assert_close(evaluate(given), wanted)
    assert not any(part.cache for part in spec.module.modules() if isinstance(part, Biased))
