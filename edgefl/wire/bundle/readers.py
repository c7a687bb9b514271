"""Readers: settings that turn files of a device into samples. They are part of the bundle, so all devices read alike.

Arrays (npz, npy, idx) need no reader. Settings that all readers share (shape and dtype of a sample, names of the
classes) are in :class:`edgefl.wire.bundle.manifest.DataSpec`.
"""

from __future__ import annotations

import msgspec

from edgefl.wire.blobs import BlobRef


class ImageSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="image"):
    """Reader of PNG and JPEG files as uint8 (C, H, W), grey (C = 1) or RGB (C = 3).

    Images are rotated by their EXIF orientation and stretched bilinearly to H x W. It is the default reader for samples
    of this shape.

    Attributes:
        white: Value of a white pixel, from 1 to 255.
    """

    white: int = 255


class TableSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="table"):
    """Reader of records in CSV or JSON lines.

    Attributes:
        columns: Columns of ``x`` (n, columns), in this order.
        label: Column of ``y``.
        mean: Number per column that is subtracted from ``x``. Empty: not subtracted.
        deviation: Number per column by which ``x`` is divided after that. Empty: not divided.
        others: Columns of each additional input of the model. An input without an entry has one column, of its own
            name.
    """

    columns: tuple[str, ...]
    label: str
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    others: dict[str, tuple[str, ...]] = {}


class SeriesSpec(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="series"
):
    """Reader of sensor series: one CSV or JSON-lines file per recording, cut into windows.

    Attributes:
        columns: Columns of ``x``.
        window: Rows of a window.
        step: Rows between the beginnings of two windows.
        label: Column of the label; a window's label is its most frequent one, the first of equally frequent ones. "":
            the name of the class folder that contains the file.
        mean: Number per column that is subtracted from ``x``. Empty: not subtracted.
        deviation: Number per column by which ``x`` is divided after that. Empty: not divided.
        channels_last: ``x`` has the shape (n, window, columns) instead of (n, columns, window).
    """

    columns: tuple[str, ...]
    window: int
    step: int
    label: str = ""
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    channels_last: bool = False


class SoundSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="sound"):
    """Reader of WAV files. Channels are averaged, to values in [-1, 1).

    Without ``mels``, ``x`` is the waveform, of shape (length,) or (1, length). With ``mels``, ``x`` is log-mel features
    of shape (1, mels, frames), which the graph ``features`` computes: ``batch.0.x`` float32 (1, length) -> ``record.x``
    (1, *shape).

    Attributes:
        rate: Samples per second that a file must have.
        length: Number of samples; longer files are cut, shorter ones padded with zeros.
        mels: Number of mel bands. 0: the waveform.
        window: Samples of a frame.
        step: Samples between the beginnings of two frames.
        features: Name of the bundle's graph that computes the features.
    """

    rate: int
    length: int
    mels: int = 0
    window: int = 0
    step: int = 0
    features: str = ""


class TextSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="text"):
    """Reader of texts as token numbers of shape (length,), padded with zeros.

    Attributes:
        tokenizer: Blob with the JSON of a tokenizer of the ``tokenizers`` library. None: tokens are the bytes of UTF-8.
        mask: Additional input that is 1 at tokens and 0 at padding. "": none.
        text: Column of the text in CSV and JSON lines.
        label: Column of the label. It is unused if labels have the shape of ``x``: then they are the next tokens, and
            all texts are joined to one.
    """

    tokenizer: BlobRef | None = None
    mask: str = ""
    text: str = "text"
    label: str = "label"


Reader = ImageSpec | TableSpec | SeriesSpec | SoundSpec | TextSpec


def find_problem(reader: Reader) -> str:
    """Return the reason for which the settings of a reader are invalid, or "" if they are valid."""
    if isinstance(reader, ImageSpec):
        return "" if 0 < reader.white <= 255 else f"white is {reader.white}, of 1 to 255"
    if isinstance(reader, SoundSpec):
        counts = {"rate": reader.rate, "length": reader.length}
        counts |= {"window": reader.window, "step": reader.step} if reader.mels else {}
        if reader.mels < 0 or (reader.mels and reader.window > reader.length):
            return (
                f"mels {reader.mels} of a window of {reader.window} in {reader.length} samples cannot be made"
            )
    elif isinstance(reader, SeriesSpec):
        counts = {"window": reader.window, "step": reader.step}
    else:
        counts = {}
    for name, value in counts.items():
        if value < 1:
            return f"{name} is {value}, and at least 1"
    if isinstance(reader, TableSpec | SeriesSpec):
        return _problem_of_columns(reader)
    return ""


def _problem_of_columns(reader: TableSpec | SeriesSpec) -> str:
    if not reader.columns or len({*reader.columns}) < len(reader.columns):
        return f"columns are {', '.join(reader.columns) or 'none'}: at least one, each once"
    for name in ("mean", "deviation"):
        numbers = getattr(reader, name)
        if numbers and len(numbers) != len(reader.columns):
            return f"{name} has {len(numbers)} numbers for {len(reader.columns)} columns"
    if not all(reader.deviation):
        return "a deviation is 0"
    return ""
