"""How a device's own files become samples: said by the federation, so that every device reads alike.

Arrays (npz, npy, idx) need none of this. What is common to all readers is in :class:`edgefl.wire.bundle.manifest.DataSpec`:
the shape and dtype of a sample, and the names of the classes.
"""

from __future__ import annotations

import msgspec

from edgefl.wire.blobs import BlobRef


class Image(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="image"):
    """PNG and JPEG, uint8 (C, H, W): turned upright as the camera noted it, in grey (C = 1) or RGB (C = 3), stretched to
    H x W (bilinear).

    ``white``: the number of a white pixel. It is read where a bundle of such samples names no reader.
    """

    white: int = 255


class Table(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="table"):
    """Records of CSV or JSON lines: x (n, columns) from the named columns in this order, y from the column ``label``.

    ``mean`` and ``deviation``, one number for each column: x becomes ``(x - mean) / deviation``. Empty: as it is.
    ``others``: the columns of each input beside x; without an entry, the column of its name.
    """

    columns: tuple[str, ...]
    label: str
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    others: dict[str, tuple[str, ...]] = {}


class Series(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="series"):
    """Sensor series, a CSV or JSON lines for each recording: windows of ``window`` rows, a new one every ``step`` rows.

    x is (n, columns, window), with ``channels_last`` (n, window, columns). A window's label is the one that most of its rows
    have in the column ``label`` (of equally many the one that comes first); without ``label``, the class whose folder the
    file is in. ``mean`` and ``deviation`` as in a table.
    """

    columns: tuple[str, ...]
    window: int
    step: int
    label: str = ""
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    channels_last: bool = False


class Sound(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="sound"):
    """WAV of ``rate`` samples a second, the channels averaged, in [-1, 1): the first ``length`` samples, silence behind what
    is shorter.

    With ``mels`` x is their log-mel features, (1, mels, frames), of frames of ``window`` samples, one every ``step``: the
    graph ``features`` of the bundle makes them, ``batch.0.x`` float32 (1, length) -> ``record.x`` (1, *shape). Without, x is
    the wave itself, of shape (length,) or (1, length).
    """

    rate: int
    length: int
    mels: int = 0
    window: int = 0
    step: int = 0
    features: str = ""


class Text(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="text"):
    """Texts as token numbers (length,), zeros behind what is shorter.

    ``tokenizer``: a JSON of the ``tokenizers`` library, a blob of the bundle; None: the bytes of UTF-8. ``mask``: the
    input beside x that is 1 where there is a token and 0 behind them; "" for none. ``text`` and ``label`` are names
    of columns, for CSV and JSON lines. Where labels are of the shape of x, they are the tokens that follow, and texts
    are one long text.
    """

    tokenizer: BlobRef | None = None
    mask: str = ""
    text: str = "text"
    label: str = "label"


Reader = Image | Table | Series | Sound | Text


def problem_of(reader: Reader) -> str:
    """What cannot be used about a reader, "" for nothing."""
    if isinstance(reader, Image):
        return "" if 0 < reader.white <= 255 else f"white is {reader.white}, of 1 to 255"
    if isinstance(reader, Sound):
        counts = {"rate": reader.rate, "length": reader.length}
        counts |= {"window": reader.window, "step": reader.step} if reader.mels else {}
        if reader.mels < 0 or (reader.mels and reader.window > reader.length):
            return (
                f"mels {reader.mels} of a window of {reader.window} in {reader.length} samples cannot be made"
            )
    elif isinstance(reader, Series):
        counts = {"window": reader.window, "step": reader.step}
    else:
        counts = {}
    for name, value in counts.items():
        if value < 1:
            return f"{name} is {value}, and at least 1"
    if isinstance(reader, Table | Series):
        return _problem_of_columns(reader)
    return ""


def _problem_of_columns(reader: Table | Series) -> str:
    if not reader.columns or len({*reader.columns}) < len(reader.columns):
        return f"columns are {', '.join(reader.columns) or 'none'}: at least one, each once"
    for name in ("mean", "deviation"):
        numbers = getattr(reader, name)
        if numbers and len(numbers) != len(reader.columns):
            return f"{name} has {len(numbers)} numbers for {len(reader.columns)} columns"
    if not all(reader.deviation):
        return "a deviation is 0"
    return ""
