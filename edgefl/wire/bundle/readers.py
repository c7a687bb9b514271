"""Readers: how files of a device become samples. The federation chooses them, so that every device reads alike.

Arrays (npz, npy, idx) need no reader. :class:`edgefl.wire.bundle.manifest.DataSpec` has the settings of all readers: shape
and dtype of a sample, and the names of the classes.
"""

from __future__ import annotations

import msgspec

from edgefl.wire.blobs import BlobRef


class ImageReader(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="image"
):
    """PNG and JPEG as uint8 (C, H, W), in grey (C = 1) or RGB (C = 3).

    Images are turned upright by their EXIF orientation and stretched to H x W (bilinear). ``white``: value of a white pixel.
    It is the default reader for samples of this shape.
    """

    white: int = 255


class TableReader(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="table"
):
    """Records of CSV or JSON lines: x (n, columns) from the named columns in this order, y from the column ``label``.

    ``mean`` and ``deviation``, one number for each column: x becomes ``(x - mean) / deviation``. Empty: unchanged.
    ``others``: columns of each additional input; without an entry, the column of its name.
    """

    columns: tuple[str, ...]
    label: str
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    others: dict[str, tuple[str, ...]] = {}


class SeriesReader(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="series"
):
    """Sensor series, a CSV or JSON lines for each recording: windows of ``window`` rows, a new one every ``step`` rows.

    x is (n, columns, window), with ``channels_last`` (n, window, columns). A window's label is the most frequent one in the
    column ``label``, the first of several. Without ``label`` it is the class whose folder contains the file. ``mean`` and
    ``deviation`` as in a table.
    """

    columns: tuple[str, ...]
    window: int
    step: int
    label: str = ""
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    channels_last: bool = False


class SoundReader(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="sound"
):
    """WAV of ``rate`` samples a second, channels averaged, in [-1, 1): the first ``length`` samples, padded with silence.

    With ``mels`` x is log-mel features (1, mels, frames), of frames of ``window`` samples, one every ``step``. The graph
    ``features`` of the bundle computes them: ``batch.0.x`` float32 (1, length) -> ``record.x`` (1, *shape). Without, x is
    the wave itself, of shape (length,) or (1, length).
    """

    rate: int
    length: int
    mels: int = 0
    window: int = 0
    step: int = 0
    features: str = ""


class TextReader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="text"):
    """Texts as token numbers (length,), padded with zeros.

    Attributes:
        tokenizer: JSON of the ``tokenizers`` library, a blob of the bundle. None: the bytes of UTF-8.
        mask: Additional input that is 1 at tokens and 0 at padding. "": none.
        text: Column of the text in CSV and JSON lines.
        label: Column of the label. If labels have the shape of x, they are the next tokens, and all texts form one long
            text.
    """

    tokenizer: BlobRef | None = None
    mask: str = ""
    text: str = "text"
    label: str = "label"


Reader = ImageReader | TableReader | SeriesReader | SoundReader | TextReader


def problem_of(reader: Reader) -> str:
    """Return the problem of a reader that cannot be used, or ""."""
    if isinstance(reader, ImageReader):
        return "" if 0 < reader.white <= 255 else f"white is {reader.white}, of 1 to 255"
    if isinstance(reader, SoundReader):
        counts = {"rate": reader.rate, "length": reader.length}
        counts |= {"window": reader.window, "step": reader.step} if reader.mels else {}
        if reader.mels < 0 or (reader.mels and reader.window > reader.length):
            return (
                f"mels {reader.mels} of a window of {reader.window} in {reader.length} samples cannot be made"
            )
    elif isinstance(reader, SeriesReader):
        counts = {"window": reader.window, "step": reader.step}
    else:
        counts = {}
    for name, value in counts.items():
        if value < 1:
            return f"{name} is {value}, and at least 1"
    if isinstance(reader, TableReader | SeriesReader):
        return _problem_of_columns(reader)
    return ""


def _problem_of_columns(reader: TableReader | SeriesReader) -> str:
    if not reader.columns or len({*reader.columns}) < len(reader.columns):
        return f"columns are {', '.join(reader.columns) or 'none'}: at least one, each once"
    for name in ("mean", "deviation"):
        numbers = getattr(reader, name)
        if numbers and len(numbers) != len(reader.columns):
            return f"{name} has {len(numbers)} numbers for {len(reader.columns)} columns"
    if not all(reader.deviation):
        return "a deviation is 0"
    return ""
