"""Log-mel features of sounds, from convolutions and products alone: any engine computes them as torch does."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from edgefl.errors import ConfigError
from edgefl.wire.bundle.readers import SoundReader

FLOOR = 1e-6
"""Added to the power before the logarithm: silence is log(1e-6)."""


class LogMel(nn.Module):
    """Layer from sounds (n, length), float32 in [-1, 1), to log-mel features (n, 1, mels, frames), float32.

    Frames lie within the sound, ``1 + (length - window) // step`` of them. Each is weighted by a periodic Hann window. The
    power of its discrete Fourier transform is summed by ``mels`` triangles, evenly spread on the mel scale of O'Shaughnessy
    (2595 log10(1 + f / 700)) from 0 to half the rate. The feature is log(power + 1e-6).

    Args:
        rate: samples per second.
        length: samples of a sound.
        mels: number of triangles.
        window: samples of a frame.
        step: samples from the start of a frame to that of the next.

    Raises:
        ConfigError: the window is longer than the sound, or a number is not positive.
    """

    def __init__(self, *, rate: int, length: int, mels: int, window: int, step: int) -> None:
        super().__init__()
        if not 0 < window <= length or step < 1 or mels < 1 or rate < 1:
            raise ConfigError(
                f"log-mel features need a window within the sound and positive numbers, found window {window} of {length} "
                f"samples, step {step}, mels {mels}, rate {rate}"
            )
        self.step, self.bins = step, window // 2 + 1
        time, bins = torch.arange(window, dtype=torch.float64), torch.arange(self.bins, dtype=torch.float64)
        hann = 0.5 - 0.5 * torch.cos(2 * math.pi * time / window)
        angle = 2 * math.pi * (bins[:, None] * time).remainder(window) / window
        waves = torch.cat([torch.cos(angle), -torch.sin(angle)]) * hann
        self.register_buffer("waves", waves[:, None].float(), persistent=False)
        self.register_buffer("bank", _triangles(rate, window, mels).float(), persistent=False)

    @classmethod
    def of(cls, reader: SoundReader) -> LogMel:
        """Return the layer with the settings of a reader."""
        return cls(
            rate=reader.rate, length=reader.length, mels=reader.mels, window=reader.window, step=reader.step
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of sounds: (n, length) -> (n, 1, mels, frames)."""
        parts = nn.functional.conv1d(x[:, None], self.get_buffer("waves"), stride=self.step)
        real, imaginary = parts[:, : self.bins], parts[:, self.bins :]
        power = real * real + imaginary * imaginary
        return torch.log(self.get_buffer("bank") @ power + FLOOR)[:, None]


def _triangles(rate: int, window: int, mels: int) -> Tensor:
    """Return the weight of each frequency in each mel, float64 (mels, window // 2 + 1)."""
    frequencies = torch.arange(window // 2 + 1, dtype=torch.float64) * rate / window
    top = 2595.0 * math.log10(1.0 + rate / 2 / 700.0)
    edges = 700.0 * (10.0 ** (torch.linspace(0.0, top, mels + 2, dtype=torch.float64) / 2595.0) - 1.0)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
    return torch.minimum(rising, falling).clamp(min=0.0)
