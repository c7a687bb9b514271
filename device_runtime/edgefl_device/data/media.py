"""Readers of images (through Pillow, extra ``images``) and of WAV files, with one folder for each class."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from io import BufferedReader
from os import SEEK_CUR, fstat
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edgefl.errors import DataError
from edgefl.wire.bundle.readers import ImageSpec, SoundSpec
from edgefl.wire.images import ImageError, import_pillow, read_pixels
from edgefl.wire.records import BadRow
from edgefl.wire.tensors import Array
from edgefl_device.data.problems import converted
from edgefl_device.data.reading import FileEntry, ReadContext, ReadSamples

_FULL = {1: 1 << 7, 2: 1 << 15, 3: 1 << 23, 4: 1 << 31}
"""What 1.0 is in samples of so many bytes."""
_INTEGERS, _FLOATS, _EXTENSIBLE = 1, 3, 0xFFFE
"""Codes of formats."""
_UNKNOWN_BYTES = 0x7FFF0000
"""An algorithm that writes to a pipe cannot go back and fill in the sizes: it leaves 0, or at least this much."""


def read_sounds(reading: ReadContext, entries: tuple[FileEntry, ...]) -> ReadSamples:
    """Return one sample for each WAV file: its waveform, or the features that a graph of the bundle computes from it.

    Labels are the class numbers of the files' folders. Files that cannot be decoded are added to ``reading.problems``.

    Raises:
        DataError: The model takes samples of another shape or other labels, or bad files are refused.
    """
    reader = reading.reader
    assert isinstance(reader, SoundSpec)
    shape = reading.spec.shape
    if reader.features:
        features = reading.parts.features(reader.features)

        def sample(waves: Array) -> Array:
            return features(waves[None]).reshape(shape)
    else:
        reading.check_shape((reader.length,), (1, reader.length))

        def sample(waves: Array) -> Array:
            return waves.reshape(shape)

    return reading.decoded(reading.by_folder(entries), lambda path: wave_of(path, reader), sample)


def wave_of(path: Path, reader: SoundSpec) -> Array:
    """Return the waveform of a WAV file as float32 (length,) in [-1, 1], cut or padded with zeros.

    Raises:
        BadRow: The file is no WAV of integers or floats, is damaged or empty, or has another sampling rate.
    """
    try:
        with path.open("rb") as file:
            heard = _read_mono(file, reader)
    except struct.error as error:
        raise BadRow("is no WAV that can be read: it ends too early") from error
    except OSError as error:
        raise BadRow(f"is no WAV that can be read: {error}") from error
    padded = np.zeros(reader.length, np.float32)
    padded[: len(heard)] = converted(heard, "float32")
    if not np.isfinite(padded).all():
        raise BadRow("has samples that are beyond what float32 holds")
    return padded


def _read_mono(file: BufferedReader, reader: SoundSpec) -> Array:
    """Read an open WAV file; return the mean of its channels, float64 in [-1, 1], cut at the reader's length.

    Raises:
        BadRow: The file is not a readable WAV file, or has another sample rate than ``reader``.
    """
    start = file.read(12)
    if start[:4] != b"RIFF" or start[8:] != b"WAVE":
        raise BadRow("is no WAV that can be read: it does not begin with RIFF and WAVE")
    kind = channels = rate = frame = bits = 0
    for name, size in _chunks(file):
        if name == b"fmt ":
            fields = file.read(size)
            kind, channels, rate, _, frame, bits = struct.unpack_from("<HHLLHH", fields)
            if kind == _EXTENSIBLE:  # the code is in the first bytes of a GUID
                kind = struct.unpack_from("<H", fields, 24)[0]
        elif name == b"data":
            break
    else:
        raise BadRow("is no WAV that can be read: it has no samples")
    width = -(-bits // 8)
    if not channels or (kind, width) not in {
        *((_INTEGERS, each) for each in _FULL),
        (_FLOATS, 4),
        (_FLOATS, 8),
    }:
        raise BadRow(
            f"is no WAV that can be read: its samples are of format {kind:#x} with {bits} bits; convert them to "
            "integers of 8, 16, 24 or 32 bits (PCM)"
        )
    if frame != channels * width:
        raise BadRow(
            f"is damaged: a sample of each of its {channels} channels, of {bits} bits, takes {frame} bytes, expected "
            f"{channels * width}; write the file anew"
        )
    if rate != reader.rate:
        raise BadRow(f"has {rate} samples a second, the federation's have {reader.rate}: convert it")
    piped = size >= _UNKNOWN_BYTES or (not size and not _is_chunk(file))
    wanted = reader.length * frame if piped else min(size // frame, reader.length) * frame
    content = file.read(wanted)
    if len(content) < frame:
        raise BadRow("is damaged: it is shorter than it says" if wanted and not piped else "holds no sound")
    if not piped and len(content) < wanted:
        raise BadRow("is damaged: it is shorter than it says")
    whole = content[: len(content) // frame * frame]
    mean: Array = _decode_numbers(whole, width, kind).reshape(-1, channels).mean(axis=1)
    return mean


def _chunks(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield name and size of each RIFF chunk, with the file positioned at the chunk's content."""
    while len(head := file.read(8)) == 8:
        name, size = struct.unpack("<4sL", head)
        begin = file.tell()
        yield name, size
        file.seek(begin + size + size % 2)


def _is_chunk(file: BufferedReader) -> bool:
    """Return True if the file is at its end, or at the header of a chunk that fits into the rest of the file."""
    head = file.read(8)  # peek() may return fewer bytes than the file has
    file.seek(-len(head), SEEK_CUR)
    if len(head) < 8:
        return not head
    name, size = struct.unpack("<4sL", head)
    room = fstat(file.fileno()).st_size - file.tell() - 8
    return bool(name.isascii() and name.decode().isprintable() and size <= room)


def _decode_numbers(content: bytes, width: int, kind: int) -> Array:
    """Decode the content of a WAV data chunk to float64 in [-1, 1], channels interleaved.

    Args:
        content: Bytes of the chunk.
        width: Bytes of one value.
        kind: Format code of the WAV header: 1 for integers, 3 for floats.

    Raises:
        BadRow: A float is NaN or infinite.
    """
    if kind == _FLOATS:
        floats = np.frombuffer(content, f"<f{width}").astype(np.float64)
        if not np.isfinite(floats).all():
            raise BadRow("has samples that are NaN or infinite")
        return floats
    if width == 1:
        found = np.frombuffer(content, np.uint8).astype(np.float64) - 128
    elif width == 3:
        raw = np.frombuffer(content, np.uint8).reshape(-1, 3)
        wide = np.zeros((len(raw), 4), np.uint8)
        wide[:, 1:] = raw  # its sign is in the highest byte
        found = wide.view("<i4")[:, 0].astype(np.float64) / 256
    else:
        found = np.frombuffer(content, f"<i{width}").astype(np.float64)
    return found / _FULL[width]


_MODES = {1: "L", 3: "RGB"}


def read_images(reading: ReadContext, entries: tuple[FileEntry, ...]) -> ReadSamples:
    shape, reader = reading.spec.shape, reading.reader
    assert isinstance(reader, ImageSpec)
    if len(shape) != 3 or shape[0] not in _MODES:
        raise DataError(
            f"{reading.source}: images become samples of shape (1, H, W) or (3, H, W), the model takes {shape}: give arrays "
            "(.npz)",
            expected=shape,
        )
    pillow = import_pillow()
    _, height, width = shape
    mode = _MODES[shape[0]]

    def decode(path: Path) -> Array:
        try:
            pixels = read_pixels(pillow, path, mode, (width, height))
        except ImageError as error:
            raise BadRow(str(error)) from error
        channels = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)
        if reader.white == 255:
            return np.ascontiguousarray(channels)
        scaled: Array = (channels.astype(np.uint16) * reader.white + 127) // 255
        return scaled.astype(np.uint8)

    return reading.decoded(reading.by_folder(entries), decode)
