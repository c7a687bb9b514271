"""Complex tensors between real ones run on both engines, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from edgefl.errors import ExportError
from tests.exporters.engines import ENGINES, agree, function_of, on_engine

# 3 x 2 x 4 numbers, none of them 0.
X = torch.linspace(-1.7, 2.1, 24).reshape(3, 2, 4)
ANGLES = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.3]))
TABLE = torch.polar(torch.ones(5, 2), ANGLES)


def pairs(x: Tensor) -> Tensor:
    """Return [3, 2, 2] complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (2, 2)))


def reals(z: Tensor) -> Tensor:
    return torch.view_as_real(z)


def written(x: Tensor) -> Tensor:
    z = pairs(x).clone()
    z[:, 0] *= TABLE[1]
    z.add_(1j).mul_(x[..., 1:3])
    z[0] = 2.0
    z[1:, 1] = x[1:, 1, :2]
    w = pairs(x).clone()
    w.real.mul_(3)
    return reals(z + w)


def moved(x: Tensor) -> Tensor:
    z = pairs(x)
    z = torch.cat([z, z.flip(0), torch.ones(1, 2, 2)]).roll(0).repeat(1, 2, 1)
    parts = [*z.transpose(0, -1).unsqueeze(-2).squeeze(-2).split(3, -1), z[None, 2].permute(2, 1, 0)]
    return torch.stack([reals(part).sum((0, 2)) for part in parts])


def chosen(x: Tensor) -> Tensor:
    z = pairs(x)
    z = torch.where(x[..., :2] > 0, z, z.conj() * 2)
    z = z.masked_fill(x[..., 1:3] > 1, 0.5j)
    return reals(z[[2, 0], :, 1]) + reals(torch.index_select(z, 0, torch.tensor([1, 1]))[:, 0])


def arithmetic(x: Tensor) -> Tensor:
    z, w = pairs(x), pairs(x).conj() + (3 - 1j)
    y = z / w + 2 - z * (0.5 + 2j) + x[..., :2] / z - 1 / w + (1 - z)
    return reals(y - x[..., :2] * 1j + z**3 + 2.0**z)


def functions(x: Tensor) -> Tensor:
    z = pairs(x)
    return torch.stack(
        [z.abs(), z.angle(), z.log().imag, torch.exp(z).real, z.sgn().imag, (z * z.conj()).real]
    )


def products(x: Tensor) -> Tensor:
    z = pairs(x)
    scores = torch.einsum("bij,bkj->bik", z, z.conj())
    mixed = (scores @ z.reshape(3, 2, 2)).reshape(6, 2) @ TABLE[:2].T
    return reals(mixed.mean(0) + mixed.sum() * 0.1)


def made(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[0]).float()[:, None] * x.mean((0, 1))[:2]
    table = torch.exp(1j * angles) + torch.polar(angles, angles) + torch.complex(angles, angles.cos())
    return reals((pairs(x) + x[..., :2]) * table[:, None].to(torch.complex64))


def types(x: Tensor) -> Tensor:
    z = x.contiguous().view(torch.complex64) * TABLE.to(torch.complex128)[3]
    return z.to(torch.complex64).contiguous().view(torch.float32) + x.to(torch.complex64).real


def joined(x: Tensor) -> Tensor:
    # Entries in another order than in memory, before a view.
    z = pairs(x).permute(2, 0, 1) * TABLE[1, :, None, None]
    return reals(z.permute(1, 2, 0)).flatten(1)


def fourier(x: Tensor) -> Tensor:
    mixed = torch.fft.fft2(x, dim=(0, 2)).real + torch.fft.ifft(pairs(x), dim=0, norm="ortho").imag.repeat(
        1, 1, 2
    )
    spectrum = torch.fft.rfft2(x[:, 0, :3], s=(4, 5), norm="ortho") * TABLE[:4, :1]
    back = torch.fft.irfft2(spectrum, s=(4, 5), norm="ortho")
    return torch.cat([mixed.flatten(), back.flatten(), torch.fft.irfft(torch.fft.rfft(x), n=4).flatten()])


FORMS = (fourier, written, moved, chosen, arithmetic, functions, products, made, types, joined)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_complex_numbers_between_real_ones_agree(form: Callable[[Tensor], Tensor], engine: str) -> None:
    agree(engine, form, X, gradients=True)


@pytest.mark.parametrize(
    ("form", "op", "remedy"),
    [
        (lambda x: torch.fft.rfft(x.flatten().repeat(200)).abs(), "aten._fft_r2c.default", "cos"),
        (lambda x: pairs(x).prod(0).abs(), "aten.prod.dim_int", "real and imaginary parts"),
        (pairs, "metric", "view_as_real"),
    ],
)
def test_a_refusal_says_what_to_write(form: Callable[[Tensor], Tensor], op: str, remedy: str) -> None:
    with pytest.raises(ExportError, match=remedy) as refused:
        on_engine("onnx", function_of(form, (X,)), (X,))

    assert op in refused.value.message or op == "metric"
