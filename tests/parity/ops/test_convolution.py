"""Convolutions and transposed convolutions, in one to three dimensions."""

from __future__ import annotations

import pytest
from torch import nn

from tests.parity.ops.case import Case, Family, agrees, every

CASES: Family = {
    "Conv2d": {
        "plain": Case(nn.Conv2d(3, 4, 3), (2, 3, 7, 6)),
        "padded, no bias": Case(nn.Conv2d(16, 8, 3, padding=1, bias=False), (2, 16, 6, 6)),
        "pointwise": Case(nn.Conv2d(16, 8, 1), (2, 16, 5, 5)),
        "pointwise, strided": Case(nn.Conv2d(16, 8, 1, stride=2), (2, 16, 7, 7)),
        "strided, odd remainder": Case(nn.Conv2d(16, 4, 3, stride=2, padding=1), (2, 16, 8, 7)),
        "stride leaves rows unread": Case(nn.Conv2d(3, 4, 3, stride=3), (2, 3, 10, 11)),
        "stride larger than kernel": Case(nn.Conv2d(3, 4, 2, stride=3), (2, 3, 10, 11)),
        "patches": Case(nn.Conv2d(3, 8, 4, stride=4), (2, 3, 8, 12)),
        "dilated": Case(nn.Conv2d(16, 4, 3, dilation=2, padding=2), (2, 16, 9, 8)),
        "dilated and strided": Case(nn.Conv2d(16, 4, 3, dilation=2, stride=2, padding=1), (2, 16, 11, 10)),
        "uneven kernel and padding": Case(
            nn.Conv2d(8, 4, (1, 5), padding=(0, 2), stride=(2, 1)), (2, 8, 6, 7)
        ),
        "padding beyond the kernel": Case(nn.Conv2d(3, 4, 1, padding=1), (2, 3, 5, 5)),
        "padding same": Case(nn.Conv2d(3, 4, 3, padding="same"), (2, 3, 6, 5)),
        "padding same, even kernel": Case(nn.Conv2d(3, 4, (2, 4), padding="same"), (2, 3, 6, 5)),
        "padding same, dilated": Case(nn.Conv2d(3, 4, 3, padding="same", dilation=2), (2, 3, 7, 6)),
        "padding valid": Case(nn.Conv2d(3, 4, 3, padding="valid"), (2, 3, 6, 5)),
        "padding mode reflect": Case(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 6, 5)),
        "padding mode replicate": Case(nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"), (2, 3, 6, 5)),
        "padding mode circular": Case(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 6, 5)),
        "unbatched": Case(nn.Conv2d(3, 4, 3), (3, 7, 6)),
        "grouped": Case(nn.Conv2d(6, 4, 3, groups=2, padding=1), (2, 6, 6, 5)),
        "grouped, strided": Case(nn.Conv2d(6, 9, 3, groups=3, stride=2), (2, 6, 8, 9)),
        "depthwise": Case(nn.Conv2d(5, 5, 3, groups=5, padding=1), (2, 5, 6, 6)),
        "depthwise, strided": Case(nn.Conv2d(5, 5, 3, groups=5, padding=1, stride=2), (2, 5, 6, 7)),
        "depthwise, dilated": Case(nn.Conv2d(5, 5, 3, groups=5, padding=2, dilation=2), (2, 5, 6, 7)),
        "depthwise, small planes": Case(nn.Conv2d(32, 32, 3, groups=32, padding=1), (2, 32, 5, 6)),
        "depthwise, small planes, strided and dilated": Case(
            nn.Conv2d(32, 32, (3, 2), groups=32, padding=(2, 1), stride=2, dilation=(2, 1)), (2, 32, 8, 7)
        ),
        "depthwise, small planes, no bias": Case(
            nn.Conv2d(40, 40, 5, groups=40, padding=2, bias=False), (3, 40, 4, 4)
        ),
        "depthwise, small planes, large kernel": Case(
            nn.Conv2d(32, 32, 9, padding=4, groups=32), (1, 32, 8, 8)
        ),
        "depthwise, multiplied": Case(nn.Conv2d(4, 8, 3, groups=4, padding=1, stride=2), (2, 4, 7, 7)),
        "large kernel": Case(nn.Conv2d(3, 4, 9, padding=4), (2, 3, 12, 10)),
        "large kernel, depthwise": Case(nn.Conv2d(4, 4, 7, padding=3, groups=4), (2, 4, 8, 9)),
        "large kernel, strided, grouped": Case(
            nn.Conv2d(4, 6, 9, padding=2, stride=2, groups=2), (2, 4, 16, 15)
        ),
    },
    "Conv1d": {
        "plain": Case(nn.Conv1d(3, 4, 3), (2, 3, 8)),
        "strided and padded": Case(nn.Conv1d(16, 4, 5, stride=2, padding=2), (3, 16, 12)),
        "dilated, grouped": Case(nn.Conv1d(6, 4, 3, dilation=3, groups=2), (3, 6, 12)),
        "depthwise": Case(nn.Conv1d(6, 6, 3, padding=1, groups=6), (3, 6, 12)),
        "depthwise, small": Case(nn.Conv1d(32, 32, 3, padding=1, groups=32), (3, 32, 12)),
        "depthwise, small, large kernel": Case(nn.Conv1d(32, 32, 65, padding=32, groups=32), (1, 32, 64)),
        "pointwise": Case(nn.Conv1d(6, 4, 1), (3, 6, 12)),
        "padding same": Case(nn.Conv1d(6, 4, 4, padding="same"), (3, 6, 12)),
    },
    "ConvTranspose2d": {
        "plain": Case(nn.ConvTranspose2d(4, 3, 3), (2, 4, 5, 4)),
        "strided, output padded": Case(
            nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1), (2, 4, 5, 4)
        ),
        "no bias, kernel equals stride": Case(
            nn.ConvTranspose2d(4, 3, 2, stride=2, bias=False), (2, 4, 5, 4)
        ),
        "dilated": Case(nn.ConvTranspose2d(4, 3, 3, dilation=2, padding=1), (2, 4, 5, 4)),
        "grouped": Case(nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 4)),
        "depthwise, strided": Case(nn.ConvTranspose2d(4, 4, 3, groups=4, stride=2), (2, 4, 5, 4)),
    },
    "Conv3d": {
        "padded": Case(nn.Conv3d(2, 3, 3, padding=1), (2, 2, 4, 5, 6)),
        "strided and dilated, no bias": Case(
            nn.Conv3d(2, 3, (3, 2, 1), stride=(2, 1, 2), padding=(2, 1, 0), dilation=(2, 1, 1), bias=False),
            (2, 2, 7, 5, 6),
        ),
        "stride leaves planes unread": Case(nn.Conv3d(2, 3, 2, stride=3), (2, 2, 7, 6, 5)),
        "pointwise": Case(nn.Conv3d(2, 3, 1), (2, 2, 3, 4, 5)),
        "grouped": Case(nn.Conv3d(4, 6, 3, groups=2, padding=1), (1, 4, 3, 4, 5)),
        "depthwise": Case(nn.Conv3d(3, 3, 3, groups=3, padding=1), (2, 3, 4, 4, 4)),
        "flattened": Case(nn.Sequential(nn.Conv3d(2, 3, 2), nn.Flatten()), (2, 2, 3, 4, 5)),
    },
    "ConvTranspose3d": {
        "strided, output padded": Case(
            nn.ConvTranspose3d(3, 2, 3, stride=2, padding=1, output_padding=1), (2, 3, 3, 4, 2)
        ),
        "grouped, dilated": Case(nn.ConvTranspose3d(4, 6, 2, groups=2, dilation=2), (2, 4, 3, 2, 4)),
    },
    "ConvTranspose1d": {
        "strided": Case(nn.ConvTranspose1d(4, 3, 3, stride=2, padding=1, output_padding=1), (2, 4, 6)),
        "grouped": Case(nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 4, 6)),
        "dilated": Case(nn.ConvTranspose1d(4, 3, 3, dilation=2), (2, 4, 6)),
    },
}


MORE = (
    "Conv2d, padded, no bias",
    "Conv2d, pointwise",
    "Conv2d, pointwise, strided",
    "Conv2d, strided, odd remainder",
    "Conv2d, dilated and strided",
    "Conv2d, padding beyond the kernel",
    "Conv2d, padding same, even kernel",
    "Conv2d, padding mode reflect",
    "Conv2d, unbatched",
    "Conv2d, grouped, strided",
    "Conv2d, depthwise, strided",
    "Conv2d, depthwise, small planes, strided and dilated",
    "Conv2d, depthwise, multiplied",
    "Conv2d, large kernel, strided, grouped",
    "Conv1d, strided and padded",
    "Conv3d, strided and dilated, no bias",
    "Conv3d, stride leaves planes unread",
    "Conv3d, grouped",
    "ConvTranspose2d, strided, output padded",
    "ConvTranspose2d, depthwise, strided",
    "ConvTranspose1d, grouped",
)


@pytest.mark.sample(9)
@every(CASES, MORE)
def test_convolution_equals_torch(case: Case, again: bool, form: str) -> None:
    agrees(case.step(again), form)
