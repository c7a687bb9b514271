"""Class folders of PNG and JPEG."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path

import numpy as np
import pytest

from edgefl.wire import images
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import ImageSpec, SoundSpec
from edgefl_device.data.samples import DecodedRows
from edgefl_device.data.sources import load
from tests.device_runtime.data.files import every, fitted, image, pillow, sound, written
from tests.support.errors import ConfigError, DataError, refuses

RGB = DataSpec(
    shape=(3, 4, 6), dtype="float32", classes=2, scale=1 / 255, names=("cat", "dog"), reader=ImageSpec()
)
GREY = DataSpec(shape=(1, 4, 6), dtype="float32", classes=2, scale=1 / 255, names=("cat", "dog"))
PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3) * 3


def test_pixels_of_the_right_size_are_taken_as_they_are(tmp_path: Path) -> None:
    image(tmp_path / "dog" / "a.png", PIXELS)
    image(tmp_path / "cat" / "b.png", PIXELS[:, ::-1])
    data = fitted(tmp_path, RGB)

    np.testing.assert_array_equal(data.y, [0, 1])
    expected = np.stack([PIXELS[:, ::-1], PIXELS]).transpose(0, 3, 1, 2).astype(np.float32) / 255
    np.testing.assert_allclose(every(data), expected, rtol=1e-6)
    assert every(data).dtype == np.float32


def test_images_of_three_dimensions_need_no_reader(tmp_path: Path) -> None:
    image(tmp_path / "cat" / "a.png", PIXELS)

    assert every(fitted(tmp_path, GREY)).shape == (1, 1, 4, 6)


def test_files_of_any_size_and_mode_become_the_shape_of_the_model(tmp_path: Path) -> None:
    """One colour stays that colour, whatever is made of it."""
    large = np.full((300, 200, 3), (200, 100, 50), np.uint8)
    for name in ("a.png", "b.jpg", "c.JPEG"):
        image(tmp_path / "cat" / name, large)
    pillow().fromarray(large).convert("P").save(tmp_path / "cat" / "d.png")
    pillow().fromarray(large).convert("RGBA").save(tmp_path / "cat" / "e.png")
    data = fitted(tmp_path, RGB)

    assert len(data) == 5
    for row in every(data):
        np.testing.assert_allclose(row.mean(axis=(1, 2)) * 255, (200, 100, 50), atol=3)


def test_an_image_is_resized_along_its_rows_first_whatever_its_size(tmp_path: Path) -> None:
    """Pillow 13 resizes some images along their columns first, which other agents and older versions do not."""
    pixels = np.random.default_rng(3).integers(0, 256, (65, 5, 3), np.uint8)
    image(tmp_path / "cat" / "a.png", pixels)
    rows = pillow().fromarray(pixels).resize((6, 65), pillow().Resampling.BILINEAR)
    expected = np.asarray(rows.resize((6, 4), pillow().Resampling.BILINEAR)).transpose(2, 0, 1)

    np.testing.assert_array_equal(np.rint(every(fitted(tmp_path, RGB))[0] * 255), expected)


def test_a_photograph_is_turned_as_the_camera_noted(tmp_path: Path) -> None:
    left = np.zeros((6, 4), np.uint8)
    left[:, 0] = 255
    lying = pillow().fromarray(np.rot90(left).copy())  # orientation 6: turn it by 90 degrees clockwise
    exif = pillow().Exif()
    exif[0x0112] = 6
    (tmp_path / "cat").mkdir()
    lying.save(tmp_path / "cat" / "a.png", exif=exif)
    spec = DataSpec(shape=(1, 6, 4), dtype="float32", classes=2, names=("cat", "dog"))

    np.testing.assert_array_equal(every(fitted(tmp_path, spec))[0, 0], left)


def test_white_is_the_number_that_the_federation_says(tmp_path: Path) -> None:
    image(tmp_path / "cat" / "a.png", np.array([[0, 128, 255]], np.uint8))
    spec = DataSpec(shape=(1, 1, 3), dtype="float32", classes=1, names=("cat",), reader=ImageSpec(white=16))

    np.testing.assert_array_equal(every(fitted(tmp_path, spec)).reshape(-1), [0, 8, 16])


def test_images_are_decoded_when_a_batch_is_drawn(tmp_path: Path) -> None:
    for number in range(3):
        image(tmp_path / "cat" / f"{number}.png", np.full((4, 6), number, np.uint8))
    data = load(tmp_path)
    lazy = data.fitted(GREY)

    assert isinstance(lazy.x, DecodedRows)
    np.testing.assert_allclose(lazy.rows(np.array([2, 0]))[:, 0, 0, 0] * 255, [2, 0], atol=1e-5)
    assert len(lazy.first(2).x) == 2
    assert data.fitted(GREY) is lazy  # the next round does not look at every file again
    image(tmp_path / "cat" / "0.png", np.full((4, 6), 9, np.uint8))
    assert lazy.rows(np.array([0]))[0, 0, 0, 0] * 255 == pytest.approx(9)


def _truncated() -> bytes:
    buffer = io.BytesIO()
    pillow().fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()[:-600]


@pytest.mark.parametrize("content", [None, b"no image", b""])
def test_a_broken_file_is_named_or_left_out_and_counted(tmp_path: Path, content: bytes | None) -> None:
    content = _truncated() if content is None else content
    image(tmp_path / "cat" / "a.png", PIXELS)
    written(tmp_path / "cat" / "b.jpg", content)

    with pytest.raises(DataError, match=r"cat/b\.jpg: is no image that can be read: .*repair or remove"):
        fitted(tmp_path, RGB)
    data = fitted(tmp_path, RGB, policy="skip")
    assert (len(data), data.skipped.count) == (1, 1)
    assert str(data.skipped).startswith(f"1 row is left out, {tmp_path}/cat/b.jpg: is no image")


def test_a_file_that_is_gone_when_a_batch_is_drawn_is_named(tmp_path: Path) -> None:
    data = fitted(image(tmp_path / "cat" / "a.png", PIXELS).parent.parent, RGB)
    (tmp_path / "cat" / "a.png").unlink()

    with pytest.raises(DataError, match=r"cat/a\.png is no image that can be read: .*start the device again"):
        every(data)


def test_an_image_too_large_for_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image(tmp_path / "cat" / "a.png", PIXELS)
    monkeypatch.setattr(images, "_MOST_PIXELS", PIXELS[..., 0].size - 1)

    with pytest.raises(
        DataError, match=r"cat/a\.png: it has \d+ x \d+ pixels, more than \d+: make it smaller"
    ):
        fitted(tmp_path, RGB)


def test_pixels_of_16_bits_are_refused(tmp_path: Path) -> None:
    image(tmp_path / "cat" / "a.png", np.full((4, 6), 40000, np.uint16))

    with pytest.raises(DataError, match="more than 8 bits"):
        fitted(tmp_path, GREY)


def test_a_folder_that_is_no_class_is_left_out_with_all_its_files(tmp_path: Path) -> None:
    image(tmp_path / "cat" / "a.png", PIXELS)
    for name in "ab":
        image(tmp_path / "unsorted" / f"{name}.png", PIXELS)
    data = fitted(tmp_path, RGB, policy="skip")

    assert (len(data), data.skipped.count) == (1, 2)
    with pytest.raises(DataError, match="no class is called 'unsorted'; the federation's are cat, dog"):
        fitted(tmp_path, RGB)


def test_images_outside_of_class_folders_are_refused(tmp_path: Path) -> None:
    image(tmp_path / "a.png", PIXELS)

    with pytest.raises(DataError, match=r"1 files that are in no folder, such as a\.png.*\(cat, dog\)"):
        fitted(tmp_path, RGB)


def test_images_for_a_model_of_other_samples_are_refused(tmp_path: Path) -> None:
    image(tmp_path / "cat" / "a.png", PIXELS)
    spec = DataSpec(shape=(7,), dtype="float32", classes=2)

    with pytest.raises(DataError, match=r"has 1 \.png, and the bundle does not say how they become samples"):
        fitted(tmp_path, spec)
    with pytest.raises(DataError, match=r"\(1, H, W\) or \(3, H, W\), the model takes \(2, 4, 6\)"):
        fitted(tmp_path, DataSpec(shape=(2, 4, 6), dtype="float32", classes=2))


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image(tmp_path / "cat" / "a.png", PIXELS)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)

    with refuses(ConfigError, package="pillow"):
        images.import_pillow()
    with refuses(ConfigError, package="pillow"):
        load(tmp_path)


# -- class folders of WAV ----------------------------------------------------------------------------------


SOUND = DataSpec(
    shape=(1, 6), dtype="float32", classes=2, names=("off", "on"), reader=SoundSpec(rate=8000, length=6)
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

    with refuses(DataError, found="1 .txt", suffixes=(".wav",)):
        fitted(tmp_path, SOUND)
