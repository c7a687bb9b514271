"""Compressed blobs: smaller where it pays, and never unfolded further than the reference says."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from edgefl.wire.blobs import BlobRef, _zstd, compress, decompress, describe
from tests.support.errors import BundleError, refuses

TEXT = b"names of nodes and ports, again and again; " * 200
NOISE = np.random.default_rng(0).bytes(5000)
LIMIT = 1 << 20
zstd = _zstd()


def test_what_shrinks_travels_as_a_frame_that_the_reference_describes() -> None:
    ref, data = compress(TEXT, 16)

    assert (ref.codec, ref.raw, ref.size) == ("zstd", len(TEXT), len(data))
    assert len(data) < len(TEXT) // 10
    assert ref == describe(data, 16, raw=len(TEXT)) and ref.count > 1
    assert decompress(ref, data, LIMIT) == TEXT


def test_what_does_not_shrink_by_three_percent_travels_as_it_is() -> None:
    for data in (NOISE, b"", b"x", NOISE + bytes(100)):
        ref, travels = compress(data, 64)
        assert (ref, travels) == (describe(data, 64), data)
        assert decompress(ref, travels, LIMIT) == data
    assert compress(NOISE + bytes(500), 64)[0].codec == "zstd"


def test_compression_may_be_switched_off() -> None:
    assert compress(TEXT, 64, "none") == (describe(TEXT, 64), TEXT)


def test_equal_bytes_are_compressed_to_equal_bytes() -> None:
    assert compress(TEXT, 64) == compress(TEXT, 64)


def bomb(size: int) -> bytes:
    return zstd.compress(bytes(size), 19)


def test_a_frame_that_claims_more_than_its_reference_is_refused() -> None:
    data = bomb(1 << 28)

    with pytest.raises(BundleError, match="claims 268435456 bytes"):
        decompress(describe(data, 1 << 20, raw=1000), data, LIMIT)


def test_a_reference_above_the_limit_is_refused() -> None:
    data = bomb(1 << 28)
    ref = describe(data, 1 << 20, raw=1 << 28)

    with refuses(BundleError, size=268435456, limit=1048576):
        ref.check(LIMIT)
    with pytest.raises(BundleError, match="more than the limit"):
        decompress(ref, data, LIMIT)


def lying(claimed: int, actual: int) -> bytes:
    """A frame whose header claims ``claimed`` bytes (256 to 65,791) while its blocks hold ``actual`` zeros."""
    honest = zstd.compress(bytes(actual), 3)
    assert (
        zstd.get_frame_info(honest).decompressed_size == actual and honest[4] & 0xE0 == 0x60
    )  # two bytes of size, single segment
    return honest[:5] + (claimed - 256).to_bytes(2, "little") + honest[7:]


@pytest.mark.parametrize("actual", [3000, 1000])
def test_a_frame_that_lies_about_its_size_is_refused(actual: int) -> None:
    data = lying(2000, actual)

    with refuses(BundleError, sha256=..., raw=2000):
        decompress(describe(data, 1 << 20, raw=2000), data, LIMIT)


def test_a_frame_that_says_no_size_is_refused() -> None:
    data = zstd.compress(TEXT, options={zstd.CompressionParameter.content_size_flag: 0})

    with refuses(BundleError, sha256=..., raw=...):
        decompress(describe(data, 1 << 20, raw=len(TEXT)), data, LIMIT)


def test_a_cut_frame_with_a_huge_window_is_refused() -> None:
    """A whole frame is unfolded in place; a cut one would have the reader set aside the window it claims."""
    honest = zstd.compress(TEXT)
    data = (
        honest[:4] + bytes([honest[4] & ~0x20, 0x88]) + honest[5:-1]
    )  # not in a single segment, window of 128 MiB
    assert zstd.get_frame_info(data).decompressed_size == len(TEXT)

    with refuses(BundleError, sha256=..., raw=...):
        decompress(describe(data, 1 << 20, raw=len(TEXT)), data, LIMIT)


@pytest.mark.parametrize(
    "data", [b"", b"nonsense", compress(TEXT, 64)[1][:-5], compress(TEXT, 64)[1] + b"more"]
)
def test_damaged_frames_are_refused_with_a_remedy(data: bytes) -> None:
    with refuses(BundleError, sha256=..., raw=...):
        decompress(describe(data, 1 << 20, raw=len(TEXT)), data, LIMIT)


@pytest.mark.parametrize("change", [{"raw": 0}, {"raw": -1}, {"codec": ""}])
def test_a_codec_without_its_size_is_malformed(change: dict[str, object]) -> None:
    ref: BlobRef = msgspec.structs.replace(compress(TEXT, 64)[0], **change)

    with pytest.raises(BundleError, match="malformed"):
        ref.check(LIMIT)


def test_every_level_of_the_library_can_be_read() -> None:
    data = np.random.default_rng(1).integers(0, 4, 3_000_000, np.uint8).tobytes()
    for level in (-5, 1, 3, 9):
        frame = zstd.compress(data, level)
        assert decompress(describe(frame, 1 << 20, raw=len(data)), frame, 1 << 22) == data
