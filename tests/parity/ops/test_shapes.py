"""Ops that move values: joining, cutting, padding, reordering, resizing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.ops.case import Case, Family, Mask, agrees, every

IMAGES = (2, 3, 5, 6)
ODD = (2, 3, 5, 7)
CELLS = (2, 3, 3, 4, 5)


def _overwritten(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1.0
    x[:, 1:3] = y
    return x


CASES: Family = {
    "residual": {
        "added": Case(lambda x, y: x + y, (4, 6), (4, 6)),
        "broadcast": Case(lambda x, y: x + y, (4, 6), (6,)),
        "scaled": Case(lambda x, y: torch.add(x, y, alpha=0.5), (4, 6), (4, 1)),
        "in place": Case(lambda x, y: (x * 1.0).add_(y), (4, 6), (4, 6)),
    },
    "cat": {
        "channels": Case(lambda x, y: torch.cat([x, y], 1), IMAGES, (2, 4, 5, 6)),
        "last axis": Case(lambda x, y: torch.cat([x, y, x], -1), (3, 4), (3, 2)),
    },
    "stack": {
        "first axis": Case(lambda x, y: torch.stack([x, y]), (3, 4), (3, 4)),
        "last axis": Case(lambda x, y: torch.stack([x, y], -1), (3, 4), (3, 4)),
    },
    "split": {
        "sizes": Case(lambda x: x.split([1, 3, 2], 1), (2, 6, 3)),
        "equal": Case(lambda x: x.split(2, 1)[0] * x.split(2, 1)[2], (2, 6, 3)),
    },
    "chunk": {"": Case(lambda x: x.chunk(3, -1), (2, 6))},
    "unbind": {"": Case(lambda x: x.unbind(1), (2, 3, 4))},
    "slicing": {
        "range": Case(lambda x: x[:, 1:4], (3, 6)),
        "steps": Case(lambda x: x[:, 1::2], (3, 7)),
        "from the end": Case(lambda x: x[..., :-2], (3, 6)),
        "several axes": Case(lambda x: x[:, 1:, ::2, 0], IMAGES),
        "new axis": Case(lambda x: x[:, None, 1:], (3, 6)),
        "written to": Case(_overwritten, (3, 6), (3, 2)),
        "steps, many": Case(lambda x: x[:, ::2], (2, 9000)),
    },
    "select": {
        "position": Case(lambda x: x.select(1, 2), (3, 4, 2)),
        "last": Case(lambda x: x[:, -1], (3, 4, 2)),
    },
    "narrow": {"": Case(lambda x: x.narrow(1, 1, 2), (3, 4, 2))},
    "diagonal": {
        "of each block": Case(lambda x: torch.diagonal(x, dim1=1, dim2=2), (2, 4, 4)),
        "beside it": Case(lambda x: torch.diagonal(x, -1), (4, 3)),
        "large": Case(torch.diagonal, (70, 70)),
    },
    "as_strided": {
        "overlapping": Case(lambda x: x.as_strided((3, 3), (2, 1)), (3, 5)),
        "of the last rows": Case(lambda x: x[1:].as_strided((3, 2), (3, 1), 6), (4, 5)),
    },
    "tril, triu": {"tril": Case(torch.tril, (4, 4)), "triu": Case(lambda x: torch.triu(x, 1), (2, 4, 5))},
    "unfold": {
        "axis": Case(lambda x: x.unfold(1, 3, 2), (2, 9)),
        "many": Case(lambda x: x.unfold(1, 32, 1), (2, 200)),
        "windows of images": Case(nn.Unfold(2, stride=2), (2, 3, 4, 6)),
        "overlapping windows of images": Case(nn.Unfold(3, padding=1), (2, 3, 4, 5)),
        "folded back": Case(nn.Fold((4, 6), 2, stride=2), (2, 12, 6)),
    },
    "pad": {
        "zeros": Case(lambda x: F.pad(x, (1, 2, 0, 1)), IMAGES),
        "value": Case(lambda x: F.pad(x, (1, 2), value=0.5), (3, 4)),
        "cropped": Case(lambda x: F.pad(x, (-1, 2, 0, -1)), IMAGES),
        "reflect 2d": Case(lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"), IMAGES),
        "reflect 1d": Case(lambda x: F.pad(x, (2, 1), mode="reflect"), (2, 3, 5)),
        "replicate 2d": Case(lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate"), IMAGES),
        "replicate 1d": Case(lambda x: F.pad(x, (2, 1), mode="replicate"), (2, 3, 5)),
        "circular": Case(lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"), IMAGES),
    },
    "roll": {
        "one axis": Case(lambda x: x.roll(2, 1), (3, 5)),
        "two axes": Case(lambda x: x.roll((1, -2), (2, 3)), IMAGES),
        "flattened": Case(lambda x: x.roll(2), (3, 5)),
    },
    "flip": {"": Case(lambda x: x.flip(1, 2), IMAGES)},
    "permute, transpose": {
        "permute": Case(lambda x: x.permute(0, 2, 3, 1), IMAGES),
        "transpose": Case(lambda x: x.transpose(1, -1), IMAGES),
        "movedim": Case(lambda x: x.movedim(1, -1), IMAGES),
        "t": Case(lambda x: x.t(), (3, 4)),
    },
    "reshape": {
        "view": Case(lambda x: x.view(2, 15, 6), IMAGES),
        "reshape of a transpose": Case(lambda x: x.transpose(1, 2).reshape(2, -1), IMAGES),
        "flatten": Case(nn.Flatten(), IMAGES),
        "unflatten": Case(nn.Unflatten(1, (2, 3)), (2, 6, 4)),
        "squeeze, unsqueeze": Case(lambda x: x.squeeze(1).unsqueeze(-1), (3, 1, 4)),
        "pixel shuffle": Case(nn.PixelShuffle(2), (2, 8, 3, 4)),
        "pixel unshuffle": Case(nn.PixelUnshuffle(2), (2, 3, 4, 6)),
        "channel shuffle": Case(nn.ChannelShuffle(2), (2, 6, 3, 3)),
    },
    "expand, repeat": {
        "expand": Case(lambda x: x.expand(4, 3, 5), (3, 1)),
        "repeat": Case(lambda x: x.repeat(2, 3), (3, 2)),
        "repeat_interleave": Case(lambda x: x.repeat_interleave(2, 1), (3, 2)),
    },
    "Upsample": {
        "nearest": Case(nn.Upsample(scale_factor=2), IMAGES),
        "nearest, odd size": Case(nn.Upsample(size=(7, 11)), IMAGES),
        "nearest, reduced": Case(lambda x: F.interpolate(x, size=(3, 4)), IMAGES),
        "nearest 1d": Case(nn.Upsample(scale_factor=3), (2, 3, 4)),
        "bilinear": Case(nn.Upsample(scale_factor=2, mode="bilinear"), IMAGES),
        "bilinear, corners aligned": Case(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), IMAGES
        ),
        "bilinear, odd size": Case(nn.Upsample(size=(7, 11), mode="bilinear"), IMAGES),
        "linear 1d": Case(nn.Upsample(scale_factor=2, mode="linear"), (2, 3, 4)),
        "bicubic": Case(nn.Upsample(scale_factor=2, mode="bicubic"), IMAGES),
        "trilinear": Case(nn.Upsample(scale_factor=2, mode="trilinear"), CELLS),
        "nearest 3d": Case(nn.Upsample(scale_factor=2), CELLS),
        "nearest, fraction": Case(nn.Upsample(scale_factor=1.3), ODD),
        "linear 1d, fraction": Case(nn.Upsample(scale_factor=1.3, mode="linear"), (2, 3, 7)),
        "linear 1d, fraction that keeps the size": Case(
            nn.Upsample(scale_factor=1.1, mode="linear"), (2, 3, 5)
        ),
        "bilinear, halved": Case(nn.Upsample(scale_factor=0.5, mode="bilinear"), ODD),
        "bilinear, fraction": Case(nn.Upsample(scale_factor=1.3, mode="bilinear"), ODD),
        "bilinear, fraction, corners aligned": Case(
            nn.Upsample(scale_factor=1.3, mode="bilinear", align_corners=True), ODD
        ),
        "bicubic, halved": Case(nn.Upsample(scale_factor=0.5, mode="bicubic"), ODD),
        "bicubic, fraction": Case(nn.Upsample(scale_factor=1.3, mode="bicubic"), ODD),
        "bicubic, fraction that keeps one size": Case(
            nn.Upsample(scale_factor=(1.1, 2), mode="bicubic"), (2, 3, 5, 5)
        ),
        "trilinear, fraction": Case(nn.Upsample(scale_factor=1.3, mode="trilinear"), CELLS),
        "bilinear, large": Case(nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 48, 48)),
    },
    "masked_fill": {"": Case(lambda x, m: x.masked_fill(m, -2.0), (3, 4), Mask((3, 4)))},
}


MORE = (
    "slicing, steps, many",
    "slicing, written to",
    "diagonal, large",
    "as_strided, of the last rows",
    "unfold, many",
    "unfold, overlapping windows of images",
    "unfold, folded back",
    "pad, cropped",
    "pad, reflect 2d",
    "pad, replicate 1d",
    "pad, circular",
    "roll, flattened",
    "reshape, pixel shuffle",
    "expand, repeat, repeat_interleave",
    "Upsample, nearest, reduced",
    "Upsample, bilinear, corners aligned",
    "Upsample, bicubic",
    "Upsample, trilinear, fraction",
    "Upsample, linear 1d, fraction that keeps the size",
    "Upsample, bilinear, large",
    "cat, last axis",
    "split, sizes",
)


@pytest.mark.sample(14)
@every(CASES, MORE)
def test_shapes_equal_torch(case: Case, again: bool, form: str) -> None:
    agrees(case.step(again), form)
