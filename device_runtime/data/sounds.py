"""WAV files in a folder for each class."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

from device_runtime.data.problems import BadRow
from device_runtime.data.reading import Entry, Reading, Samples
from edgefl.wire.bundle.readers import Sound
from edgefl.wire.tensors import Array

_FULL = {1: 1 << 7, 2: 1 << 15, 3: 1 << 23, 4: 1 << 31}
"""What 1.0 is in samples of so many bytes."""


def read(reading: Reading, entries: tuple[Entry, ...]) -> Samples:
    reader = reading.reader
    assert isinstance(reader, Sound)
    shape = reading.spec.shape
    if reader.features:
        features = reading.parts.graph(reader.features)

        def sample(waves: Array) -> Array:
            return features(waves[None]).reshape(shape)
    else:
        reading.check_shape((reader.length,), (1, reader.length))

        def sample(waves: Array) -> Array:
            return waves.reshape(shape)

    return reading.decoded(reading.by_folder(entries), lambda path: wave_of(path, reader), sample)


def wave_of(path: Path, reader: Sound) -> Array:
    """float32 (length,) in [-1, 1). BadRow for a file that is no WAV, damaged, empty, or of another rate."""
    try:
        with wave.open(str(path), "rb") as file:
            parameters = file.getparams()
            content = file.readframes(min(parameters.nframes, reader.length))
    except Exception as error:  # wave raises RuntimeError and struct.error too for damaged files
        raise BadRow(
            f"is no WAV of whole numbers that can be read: {str(error) or 'it ends too early'}"
        ) from error
    width, channels = parameters.sampwidth, parameters.nchannels
    if parameters.framerate != reader.rate:
        raise BadRow(
            f"has {parameters.framerate} samples a second, the federation's have {reader.rate}: convert it"
        )
    if not parameters.nframes:
        raise BadRow("holds no sound")
    if width not in _FULL or len(content) < min(parameters.nframes, reader.length) * width * channels:
        raise BadRow("is damaged: it is shorter than it says")
    heard = _numbers(content, width).reshape(-1, channels).mean(axis=1) / _FULL[width]
    padded = np.zeros(reader.length, np.float32)
    padded[: len(heard)] = heard
    return padded


def _numbers(content: bytes, width: int) -> Array:
    """float64, one for each sample of each channel."""
    if width == 1:
        return np.frombuffer(content, np.uint8).astype(np.float64) - 128
    if width == 3:
        raw = np.frombuffer(content, np.uint8).reshape(-1, 3)
        wide = np.zeros((len(raw), 4), np.uint8)
        wide[:, 1:] = raw  # its sign is in the highest byte
        return wide.view("<i4")[:, 0].astype(np.float64) / 256
    return np.frombuffer(content, f"<i{width}").astype(np.float64)
