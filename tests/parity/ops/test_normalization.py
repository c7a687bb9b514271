"""Normalizations: over the batch (training, with running statistics as state, and frozen) and over a sample."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.models.layers.norms import BatchNorm
from tests.parity.ops.case import Case, Family, agrees, every

IMAGES = (4, 6, 5, 3)


class _ChannelsLast(nn.LayerNorm):
    """Layer norm over the channels of an image, as ConvNeXt has it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


CASES: Family = {
    "BatchNorm2d": {
        "training": Case(nn.BatchNorm2d(5), (4, 5, 3, 6)),
        "training, without affine": Case(nn.BatchNorm2d(5, affine=False), (4, 5, 3, 6)),
        "training, without running statistics": Case(
            nn.BatchNorm2d(5, track_running_stats=False), (4, 5, 3, 6)
        ),
        "training, other momentum": Case(nn.BatchNorm2d(5, momentum=0.3, eps=1e-3), (4, 5, 3, 6)),
        "frozen": Case(nn.BatchNorm2d(5).eval(), (4, 5, 3, 6)),
        "frozen, without affine": Case(nn.BatchNorm2d(5, affine=False).eval(), (4, 5, 3, 6)),
    },
    "BatchNorm1d": {
        "training": Case(nn.BatchNorm1d(5), (8, 5)),
        "training, on sequences": Case(nn.BatchNorm1d(5), (4, 5, 7)),
        "frozen": Case(nn.BatchNorm1d(5).eval(), (8, 5)),
    },
    "edgefl.models.layers.norms.BatchNorm": {
        "training": Case(BatchNorm(5), (4, 5, 3, 6)),
        "static": Case(BatchNorm(5, mode="static"), (4, 5, 3, 6)),
        "frozen": Case(BatchNorm(5).eval(), (4, 5, 3, 6)),
    },
    "LayerNorm": {
        "last axis": Case(nn.LayerNorm(6), (4, 5, 6)),
        "two axes": Case(nn.LayerNorm((5, 6)), (4, 5, 6)),
        "without affine": Case(nn.LayerNorm(6, elementwise_affine=False), (4, 5, 6)),
        "without bias": Case(nn.LayerNorm(6, bias=False), (4, 5, 6)),
        "channels last": Case(_ChannelsLast(6), (4, 6, 3, 5)),
    },
    "GroupNorm": {
        "groups": Case(nn.GroupNorm(2, 6), IMAGES),
        "one group": Case(nn.GroupNorm(1, 6), IMAGES),
        "as many groups as channels": Case(nn.GroupNorm(6, 6), IMAGES),
        "without affine": Case(nn.GroupNorm(2, 6, affine=False), IMAGES),
        "on sequences": Case(nn.GroupNorm(2, 6), (4, 6, 5)),
        "behind a convolution": Case(
            nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.SiLU()), (4, 3, 6, 5)
        ),
    },
    "InstanceNorm2d": {
        "": Case(nn.InstanceNorm2d(6), IMAGES),
        "affine": Case(nn.InstanceNorm2d(6, affine=True), IMAGES),
    },
    "InstanceNorm1d": {"affine": Case(nn.InstanceNorm1d(6, affine=True), (4, 6, 5))},
    "RMSNorm": {
        "": Case(nn.RMSNorm(6), (4, 5, 6)),
        "own eps": Case(nn.RMSNorm(6, eps=1e-3), (4, 5, 6)),
        "without affine": Case(nn.RMSNorm(6, elementwise_affine=False), (4, 5, 6)),
        "two axes": Case(nn.RMSNorm((5, 6)), (4, 5, 6)),
    },
    "normalize": {"": Case(lambda x: F.normalize(x, dim=1), (4, 6))},
}


@pytest.mark.sample(4)
@every(CASES, differentiable=True)
def test_normalization_equals_torch(case: Case, again: bool, form: str) -> None:
    agrees(case.step(again), form)
