"""Pooling in one to three dimensions."""

from __future__ import annotations

import pytest
from torch import nn

from tests.parity.ops.case import Case, Family, agrees, every

EVEN, ODD = (2, 3, 6, 8), (2, 3, 7, 8)

CASES: Family = {
    "MaxPool2d": {
        "plain": Case(nn.MaxPool2d(2), EVEN),
        "overlapping and padded": Case(nn.MaxPool2d(3, stride=2, padding=1), ODD),
        "dilated": Case(nn.MaxPool2d(2, stride=1, dilation=2), ODD),
        "ceil": Case(nn.MaxPool2d(2, ceil_mode=True), (2, 3, 7, 5)),
        "ceil, overlapping and padded": Case(nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), EVEN),
        "ceil, last window behind the input": Case(nn.MaxPool2d(2, 3, ceil_mode=True), (2, 3, 6, 6)),
        "ceil, last window in the padding": Case(nn.MaxPool2d(2, 2, 1, ceil_mode=True), (2, 3, 9, 5)),
        "ceil, dilated beyond the kernel": Case(nn.MaxPool2d(2, 3, dilation=3, ceil_mode=True), (2, 3, 9, 8)),
        "ties": Case(nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, stride=2)), (2, 3, 9, 9)),
        "unbatched": Case(nn.MaxPool2d(2), (3, 6, 8)),
    },
    "MaxPool1d": {
        "overlapping": Case(nn.MaxPool1d(3, stride=2), (2, 3, 9)),
        "padded": Case(nn.MaxPool1d(3, stride=2, padding=1), (2, 3, 8)),
        "ceil, last window in the padding": Case(nn.MaxPool1d(2, 2, 1, ceil_mode=True), (2, 3, 9)),
    },
    "AvgPool2d": {
        "plain": Case(nn.AvgPool2d(2), EVEN),
        "overlapping and padded": Case(nn.AvgPool2d(3, stride=2, padding=1), ODD),
        "padding not counted": Case(nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False), ODD),
        "own divisor": Case(nn.AvgPool2d(3, stride=2, divisor_override=5), ODD),
        "ceil": Case(nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True), EVEN),
        "ceil, padding not counted": Case(
            nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False), EVEN
        ),
        "ceil, flattened": Case(nn.Sequential(nn.AvgPool2d(3, ceil_mode=True), nn.Flatten()), ODD),
        "unbatched": Case(nn.AvgPool2d(2), (3, 6, 8)),
        "large": Case(nn.AvgPool2d(2), (1, 2, 96, 96)),
    },
    "AvgPool1d": {
        "plain": Case(nn.AvgPool1d(2), (2, 3, 9)),
        "overlapping and padded": Case(nn.AvgPool1d(3, stride=2, padding=1), (2, 3, 9)),
        "ceil, padding not counted": Case(
            nn.AvgPool1d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False), (2, 3, 8)
        ),
    },
    "AdaptiveAvgPool2d": {
        "global": Case(nn.AdaptiveAvgPool2d(1), ODD),
        "even": Case(nn.AdaptiveAvgPool2d((2, 4)), EVEN),
        "uneven": Case(nn.AdaptiveAvgPool2d((3, 5)), ODD),
        "flattened": Case(nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.ReLU(), nn.Flatten()), (2, 3, 8, 8)),
        "enlarged and flattened": Case(nn.Sequential(nn.AdaptiveAvgPool2d(7), nn.Flatten()), (2, 3, 4, 4)),
        "large": Case(nn.AdaptiveAvgPool2d(66), (1, 2, 100, 100)),
    },
    "AdaptiveAvgPool1d": {
        "global": Case(nn.AdaptiveAvgPool1d(1), (2, 3, 9)),
        "uneven": Case(nn.AdaptiveAvgPool1d(4), (2, 3, 9)),
    },
    "AdaptiveMaxPool2d": {
        "global": Case(nn.AdaptiveMaxPool2d(1), ODD),
        "even": Case(nn.AdaptiveMaxPool2d((2, 4)), EVEN),
        "uneven": Case(nn.AdaptiveMaxPool2d((3, 5)), ODD),
        "enlarged": Case(nn.AdaptiveMaxPool2d(7), (2, 3, 4, 4)),
        "large": Case(nn.AdaptiveMaxPool2d(66), (1, 2, 100, 100)),
    },
    "AdaptiveMaxPool1d": {
        "global": Case(nn.AdaptiveMaxPool1d(1), (2, 3, 9)),
        "uneven": Case(nn.AdaptiveMaxPool1d(4), (2, 3, 9)),
    },
    "MaxPool3d": {
        "plain": Case(nn.MaxPool3d(2), (2, 2, 4, 5, 6)),
        "overlapping and padded, ties": Case(
            nn.Sequential(nn.ReLU(), nn.MaxPool3d(3, stride=2, padding=1)), (2, 2, 5, 6, 4)
        ),
        "uneven, dilated, ceil": Case(
            nn.MaxPool3d((2, 3, 1), stride=(2, 1, 2), dilation=(2, 1, 1), ceil_mode=True), (2, 2, 6, 5, 4)
        ),
        "positions": Case(nn.MaxPool3d(2, padding=1, return_indices=True), (2, 2, 4, 3, 5)),
        "ceil, last window in the padding": Case(
            nn.MaxPool3d(2, 2, 1, ceil_mode=True, return_indices=True), (2, 2, 5, 4, 7)
        ),
    },
    "AvgPool3d": {
        "plain": Case(nn.AvgPool3d(2), (2, 2, 4, 5, 6)),
        "padding not counted": Case(
            nn.AvgPool3d(3, stride=2, padding=1, count_include_pad=False), (2, 2, 4, 5, 6)
        ),
        "ceil": Case(nn.AvgPool3d(3, stride=2, padding=1, ceil_mode=True), (2, 2, 4, 5, 6)),
        "own divisor": Case(nn.AvgPool3d((1, 2, 3), divisor_override=5), (2, 2, 4, 5, 6)),
    },
    "AdaptiveAvgPool3d": {
        "global": Case(nn.AdaptiveAvgPool3d(1), (2, 2, 4, 5, 6)),
        "uneven": Case(nn.AdaptiveAvgPool3d((3, 2, 4)), (2, 2, 4, 5, 6)),
    },
    "AdaptiveMaxPool3d": {
        "global": Case(nn.AdaptiveMaxPool3d(1), (2, 2, 4, 5, 6)),
        "even": Case(nn.AdaptiveMaxPool3d((2, 5, 3)), (2, 2, 4, 5, 6)),
        "uneven": Case(nn.AdaptiveMaxPool3d((3, 2, 4), return_indices=True), (2, 2, 4, 5, 6)),
        "ties, enlarged": Case(nn.Sequential(nn.ReLU(), nn.AdaptiveMaxPool3d((5, 3, 7))), (2, 2, 4, 3, 6)),
        "unbatched": Case(nn.AdaptiveMaxPool3d((3, None, 4)), (2, 4, 5, 6)),
    },
    "LPPool2d": {"": Case(nn.Sequential(nn.Softplus(), nn.LPPool2d(2, 2)), EVEN)},
}


MORE = (
    "MaxPool2d, overlapping and padded",
    "MaxPool2d, dilated",
    "MaxPool2d, ceil, last window in the padding",
    "MaxPool1d, padded",
    "MaxPool3d, overlapping and padded, ties",
    "AvgPool2d, overlapping and padded",
    "AvgPool2d, padding not counted",
    "AvgPool2d, ceil, padding not counted",
    "AvgPool2d, own divisor",
    "AvgPool2d, large",
    "AdaptiveAvgPool2d, uneven",
    "AdaptiveAvgPool2d, even",
    "AdaptiveMaxPool2d, uneven",
    "AdaptiveMaxPool2d, enlarged",
    "AdaptiveMaxPool2d, large",
    "AdaptiveMaxPool3d, ties, enlarged",
)


@pytest.mark.sample(9)
@every(CASES, MORE, differentiable=True)
def test_pooling_equals_torch(case: Case, again: bool, form: str) -> None:
    agrees(case.step(again), form)
