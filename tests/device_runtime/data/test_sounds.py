"""Class folders of WAV."""

from __future__ import annotations

import struct
import wave
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import DataError
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import SoundReader
from edgefl_device.data.samples import DecodedRows
from tests.device_runtime.data.files import every, fitted, sound, written

SOUND = DataSpec(
    shape=(1, 6),
    dtype="float32",
    classes=2,
    names=("off", "on"),
    reader=SoundReader(rate=8000, length=6),
)
WAVE = np.array([0, 16384, -32768, 32767, 1, -1, 5, 5], np.int16)


def test_the_first_samples_are_taken_and_silence_is_added(tmp_path: Path) -> None:
    sound(tmp_path / "on" / "a.wav", WAVE)
    sound(tmp_path / "off" / "b.wav", WAVE[:3])
    data = fitted(tmp_path, SOUND)

    assert isinstance(data.x, DecodedRows)
    np.testing.assert_array_equal(data.y, [0, 1])
    np.testing.assert_allclose(every(data)[0, 0], [0, 0.5, -1, 0, 0, 0])
    np.testing.assert_allclose(every(data)[1, 0], WAVE[:6] / 32768)


def test_channels_are_averaged(tmp_path: Path) -> None:
    sound(tmp_path / "on" / "a.wav", np.stack([WAVE, np.zeros_like(WAVE)], axis=1))

    np.testing.assert_allclose(every(fitted(tmp_path, SOUND))[0, 0], WAVE[:6] / 65536)


@pytest.mark.parametrize(("width", "half"), [(1, 192), (2, 1 << 14), (3, 1 << 22), (4, 1 << 30)])
def test_samples_of_every_width_have_the_same_scale(tmp_path: Path, width: int, half: int) -> None:
    (tmp_path / "on").mkdir()
    with wave.open(str(tmp_path / "on" / "a.wav"), "wb") as file:
        file.setparams((1, width, 8000, 0, "NONE", ""))
        low = 64 if width == 1 else -half
        numbers = [half, low, half]
        file.writeframes(b"".join(n.to_bytes(width, "little", signed=width > 1) for n in numbers))

    np.testing.assert_allclose(every(fitted(tmp_path, SOUND))[0, 0, :4], [0.5, -0.5, 0.5, 0])


def _wav(
    content: bytes,
    kind: int = 1,
    width: int = 2,
    size: int | None = None,
    whole: int | None = None,
    head: bytes = b"",
) -> bytes:
    """A WAV as algorithms write it: extensible for ``kind`` 0xFFFE, after a chunk of odd length."""
    head = head or struct.pack("<HHLLHH", kind, 1, 8000, 8000 * width, width, 8 * width)
    if kind == 0xFFFE:
        guid = b"\x01\x00\x00\x00\x00\x00\x10\x00\x80\x00\x00\xaa\x00\x38\x9b\x71"
        head += struct.pack("<HHL", 22, 8 * width, 4) + guid
    chunks = b"LIST" + struct.pack("<L", 3) + b"abc\0" + b"fmt " + struct.pack("<L", len(head)) + head
    chunks += b"data" + struct.pack("<L", len(content) if size is None else size) + content
    return b"RIFF" + struct.pack("<L", 4 + len(chunks) if whole is None else whole) + b"WAVE" + chunks


@pytest.mark.parametrize(
    "content",
    [
        _wav(WAVE.tobytes(), kind=0xFFFE),
        _wav(WAVE.tobytes(), size=0xFFFFFFFF, whole=0xFFFFFFFF),
        _wav(WAVE.tobytes(), size=0, whole=0),
        _wav(WAVE.tobytes() + b"x", size=0x7FFFF000, whole=0x7FFFF024),
        _wav((WAVE / 32768).astype("<f4").tobytes(), kind=3, width=4),
        _wav((WAVE / 32768).astype("<f8").tobytes(), kind=3, width=8),
    ],
    ids=["extensible", "ffmpeg's pipe", "pipe without sizes", "sox's pipe", "float", "double"],
)
def test_sounds_are_read_as_algorithms_write_them(tmp_path: Path, content: bytes) -> None:
    written(tmp_path / "on" / "a.wav", content)

    np.testing.assert_allclose(every(fitted(tmp_path, SOUND))[0, 0], WAVE[:6] / 32768, atol=1e-7)


def test_another_format_is_named(tmp_path: Path) -> None:
    written(tmp_path / "on" / "a.wav", _wav(bytes(8), kind=2))

    with pytest.raises(DataError, match=r"a\.wav: .* format 0x2 with 16 bits; convert them"):
        fitted(tmp_path, SOUND)


@pytest.mark.parametrize(("channels", "bits", "frame"), [(2, 16, 2), (1, 16, 1), (2, 16, 5), (1, 16, 0)])
def test_an_incomplete_frame_is_refused(tmp_path: Path, channels: int, bits: int, frame: int) -> None:
    head = struct.pack("<HHLLHH", 1, channels, 8000, 8000 * frame, frame, bits)
    written(tmp_path / "on" / "a.wav", _wav(WAVE.tobytes(), head=head))

    with pytest.raises(
        DataError, match=rf"a\.wav: .*{bits} bits, takes {frame} bytes, expected {channels * 2}"
    ):
        fitted(tmp_path, SOUND)


def test_samples_from_a_pipe_that_look_like_text_are_no_chunk(tmp_path: Path) -> None:
    written(tmp_path / "on" / "a.wav", _wav(b"  " * 6, size=0, whole=36))

    np.testing.assert_allclose(every(fitted(tmp_path, SOUND))[0, 0], [0x2020 / 32768] * 6)


def test_an_empty_sound_is_told_wherever_a_buffer_ends(tmp_path: Path) -> None:
    for place in range(8180, 8196, 2):
        start = _wav(b"", size=0)
        pad = b"junk" + struct.pack("<L", place - len(start) - 8) + bytes(place - len(start) - 8)
        content = start[:12] + pad + start[12:] + b"LIST" + struct.pack("<L", 4) + b"more"
        written(tmp_path / "on" / "a.wav", content)
        with pytest.raises(DataError, match=r"a\.wav: holds no sound"):
            fitted(tmp_path, SOUND)


def test_samples_beyond_single_precision_are_refused(tmp_path: Path) -> None:
    content = np.array([0.5, 1e300], "<f8").tobytes()
    written(tmp_path / "on" / "a.wav", _wav(content, kind=3, width=8))

    with pytest.raises(DataError, match=r"a\.wav: has samples that are beyond what float32 holds"):
        fitted(tmp_path, SOUND)


def test_another_rate_is_refused_with_both_or_left_out(tmp_path: Path) -> None:
    sound(tmp_path / "on" / "a.wav", WAVE)
    sound(tmp_path / "on" / "b.wav", WAVE, rate=44100)

    with pytest.raises(DataError, match=r"b\.wav: has 44100 samples a second, the federation's have 8000"):
        fitted(tmp_path, SOUND)
    data = fitted(tmp_path, SOUND, policy="skip")
    assert (len(data), data.skipped.count) == (1, 1)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    whole = sound(tmp_path / "on" / "a.wav", WAVE).read_bytes()
    for content, text in (
        (whole[:-8], "damaged|ends too early"),
        (b"RIFF", "no WAV"),
        (whole[:20], "ends too early|requires a buffer"),
        (whole[:40], "no samples"),
        (b"hello, world, and all", "no WAV"),
        (sound(tmp_path / "x.wav", WAVE[:0]).read_bytes(), "holds no sound"),
    ):
        written(tmp_path / "on" / "a.wav", content)
        (tmp_path / "x.wav").unlink(missing_ok=True)
        with pytest.raises(DataError, match=rf"on/a\.wav: .*({text})"):
            fitted(tmp_path, SOUND)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "on" / "a.txt", "on")

    with pytest.raises(DataError, match=r"has 1 \.txt, and the federation's samples are read of \.wav"):
        fitted(tmp_path, SOUND)
