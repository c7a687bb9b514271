"""Log-mel features beside torch's Fourier transform."""

from __future__ import annotations

import math

import pytest
import torch

from edgefl.models.layers.log_mel import FLOOR, LogMel
from tests.support.errors import ConfigError, refuses

RATE, LENGTH, MELS, WINDOW, STEP = 8000, 2000, 20, 256, 100


def layer() -> LogMel:
    return LogMel(rate=RATE, length=LENGTH, mels=MELS, window=WINDOW, step=STEP)


def tone(hertz: float) -> torch.Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(LENGTH) / RATE)[None]


def test_power_is_that_of_the_short_time_fourier_transform() -> None:
    x = torch.randn(3, LENGTH, generator=torch.Generator().manual_seed(0)) / 4
    power = (
        torch.stft(x, WINDOW, STEP, window=torch.hann_window(WINDOW), center=False, return_complex=True)
        .abs()
        .square()
    )
    expected = torch.log(layer().get_buffer("bank") @ power + FLOOR)

    assert layer()(x).shape == (3, 1, MELS, 1 + (LENGTH - WINDOW) // STEP)
    torch.testing.assert_close(layer()(x)[:, 0], expected, rtol=1e-4, atol=1e-4)


def test_triangles_share_each_frequency_between_their_centres() -> None:
    bank = layer().get_buffer("bank")
    sums = bank.sum(dim=0)
    first, last = int(bank[0].argmax()) + 1, int(bank[-1].argmax())

    assert (bank >= 0).all() and (bank <= 1).all()
    torch.testing.assert_close(sums[first:last], torch.ones(last - first), rtol=0, atol=1e-5)


@pytest.mark.parametrize("hertz", [300.0, 1000.0, 2500.0])
def test_a_tone_lights_the_mel_that_it_belongs_to(hertz: float) -> None:
    mels = torch.linspace(0, 2595 * math.log10(1 + RATE / 2 / 700), MELS + 2)[1:-1]
    nearest = (mels - 2595 * math.log10(1 + hertz / 700)).abs().argmin()

    assert layer()(tone(hertz))[0, 0].mean(dim=1).argmax() == nearest


def test_silence_is_finite() -> None:
    torch.testing.assert_close(layer()(torch.zeros(1, LENGTH)), torch.full((1, 1, MELS, 18), math.log(FLOOR)))


def test_a_window_longer_than_the_sound_is_refused() -> None:
    with refuses(ConfigError, rate=..., length=9, mels=4, window=256, step=100):
        LogMel(rate=8000, length=9, mels=4, window=256, step=100)
