"""Log-mel features of sounds, computed by convolutions and products only, so that any engine gets torch's results."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from edgefl.errors import ConfigError
from edgefl.wire.bundle.readers import SoundSpec

FLOOR = 1e-6
"""Added to the power before the logarithm, so that silence becomes log(1e-6)."""


class LogMel(nn.Module):
    """Layer that maps sounds (n, length), float32 in [-1, 1), to log-mel features (n, 1, mels, frames), float32.

    There are ``1 + (length - window) // step`` frames, all within the sound. Each is weighted by a periodic Hann
    window. The power of its discrete Fourier transform is summed by ``mels`` triangular filters. The filters are evenly
    spaced on the mel scale of O'Shaughnessy (2595 log10(1 + f / 700)), from 0 to half the rate. The feature is
    log(power + 1e-6).

    Args:
        rate: Samples per second.
        length: Samples of a sound.
        mels: Number of triangular filters.
        window: Samples of a frame.
        step: Samples between the beginnings of two frames.

    Raises:
        ConfigError: The window is longer than the sound, or a number is not positive.
    """

    def __init__(self, *, rate: int, length: int, mels: int, window: int, step: int) -> None:
        super().__init__()
        if not 0 < window <= length or step < 1 or mels < 1 or rate < 1:
            raise ConfigError(
                f"log-mel features need a window within the sound and positive numbers, found window {window} of {length} "
                f"samples, step {step}, mels {mels}, rate {rate}",
                rate=rate,
                length=length,
                mels=mels,
                window=window,
                step=step,
            )
        self.step, self.bins = step, window // 2 + 1
        time, bins = torch.arange(window, dtype=torch.float64), torch.arange(self.bins, dtype=torch.float64)
        hann = 0.5 - 0.5 * torch.cos(2 * math.pi * time / window)
        angle = 2 * math.pi * (bins[:, None] * time).remainder(window) / window
        waves = torch.cat([torch.cos(angle), -torch.sin(angle)]) * hann
        self.register_buffer("waves", waves[:, None].float(), persistent=False)
        self.register_buffer("bank", _triangles(rate, window, mels).float(), persistent=False)

    @classmethod
    def of(cls, reader: SoundSpec) -> LogMel:
        """Return the layer with the rate, length, mels, window and step of a sound reader (settings that read sound
        files).
        """
        return cls(
            rate=reader.rate, length=reader.length, mels=reader.mels, window=reader.window, step=reader.step
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the features (n, 1, mels, frames) of sounds (n, length)."""
        parts = nn.functional.conv1d(x[:, None], self.get_buffer("waves"), stride=self.step)
        real, imaginary = parts[:, : self.bins], parts[:, self.bins :]
        power = real * real + imaginary * imaginary
        return torch.log(self.get_buffer("bank") @ power + FLOOR)[:, None]


def _triangles(rate: int, window: int, mels: int) -> Tensor:
    """Return the weight of each frequency in each triangular filter, float64 (mels, window // 2 + 1).

    Args:
        rate: Samples per second.
        window: Samples of a frame.
        mels: Number of filters.
    """
    frequencies = torch.arange(window // 2 + 1, dtype=torch.float64) * rate / window
    top = 2595.0 * math.log10(1.0 + rate / 2 / 700.0)
    edges = 700.0 * (10.0 ** (torch.linspace(0.0, top, mels + 2, dtype=torch.float64) / 2595.0) - 1.0)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
    return torch.minimum(rising, falling).clamp(min=0.0)
