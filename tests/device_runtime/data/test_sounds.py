"""Class folders of WAV."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest

from device_runtime.data.rows import DecodedRows
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import Sound
from edgefl.wire.errors import DataError
from tests.device_runtime.data.files import every, fitted, sound, written

SOUND = DataSpec(
    shape=(1, 6),
    dtype="float32",
    classes=2,
    names=("off", "on"),
    reader=Sound(rate=8000, length=6),
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
        (b"RIFF", "ends too early"),
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
