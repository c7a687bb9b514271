"""Preprocessing of files into a model's inputs, as plain values that a program on a phone follows."""

from __future__ import annotations

from typing import Any

import msgspec

from edgefl.models.layers.log_mel import FLOOR
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import ImageReader, SeriesReader, SoundReader, TableReader, TextReader
from edgefl.wire.images import DRAFT
from edgefl_export.deploy.program import Pixels, Preprocessing

Recipe = dict[str, Any]

_AXES = {
    "image": ("NCHW", ("batch", "channel", "height", "width")),
    "pixels": ("NHWC", ("batch", "height", "width", "channel")),
    "features": ("NCMT", ("batch", "channel", "mel", "frame")),
    "sound": ("NT", ("batch", "time")),
    "text": ("NT", ("batch", "token")),
    "table": ("NC", ("batch", "column")),
    "series": ("NCT", ("batch", "column", "time")),
    "series, channels last": ("NTC", ("batch", "time", "column")),
}
_UPRIGHT = "turned as its EXIF orientation says"


def recipe_of(
    data: DataSpec, *, pixels: bool, tokenizer: bytes, inside: Preprocessing | None = None
) -> Recipe:
    """Return how a file of the data becomes the first input: ``kind``, the numbers of each step, and the steps as text.

    Args:
        data: the samples of the model.
        pixels: whether samples are images of whole numbers.
        tokenizer: JSON of the tokenizer of texts; empty if tokens are bytes.
        inside: the part that the deployed file computes itself.
    """
    reader = data.reader
    if pixels and (reader is None or isinstance(reader, ImageReader)):
        return _image(data, inside)
    if isinstance(reader, SoundReader):
        return _sound(reader, inside)
    if isinstance(reader, TextReader):
        return _text(data, reader, tokenizer)
    if isinstance(reader, TableReader | SeriesReader):
        return _columns(reader, inside)
    return {
        "kind": "arrays",
        "scale": data.scale,
        "shift": data.shift,
        "steps": ["take the numbers as the training data have them; whole numbers become x * scale + shift"],
    }


def layout_of(kind: str, rank: int, recipe: Recipe) -> dict[str, Any]:
    """Return ``layout`` and ``axes`` of an input of ``rank`` axes, batch included; {} if they are not known."""
    if kind == "sound" and rank == 4:
        kind = "features"
    if kind == "series" and recipe.get("channels_last"):
        kind = "series, channels last"
    layout, axes = _AXES.get(kind, ("", ()))
    if kind == "sound" and rank == 3:
        layout, axes = "NCT", ("batch", "channel", "time")
    return {"layout": layout, "axes": list(axes)} if len(axes) == rank else {}


def _image(data: DataSpec, inside: Preprocessing | None) -> Recipe:
    channels, height, width = data.shape
    white = data.reader.white if isinstance(data.reader, ImageReader) else 255
    mode = "RGB" if channels == 3 else "L"
    size = f"{width} x {height}"
    resized = isinstance(inside, Pixels) and inside.resize
    colours = "RGB" if channels == 3 else "grey (L = 0.299 R + 0.587 G + 0.114 B)"
    steps = [f"decode a PNG or JPEG, {_UPRIGHT}, to {colours}, 8 bits"]
    if not resized:
        steps.append(
            f"stretch it to {size} pixels by a bilinear filter with antialiasing (Pillow's BILINEAR), rounded to 8 bits"
        )
    if inside is None:
        if white != 255:
            steps.append(f"pixel = (pixel * {white} + 127) // 255, in whole numbers")
        steps.append("x = pixel * scale + shift, as (1, channel, height, width)")
    else:
        steps.append("pass the pixels as uint8 (1, height, width, channel); the file does the rest")
    # Of pixels in [0, 1], as torchvision's Normalize and Android's libraries take them.
    mean, deviation = -data.shift / data.scale / white, 1 / data.scale / white
    numbers: Recipe = {"white": white, "scale": data.scale, "shift": data.shift}
    numbers |= {"mean": [mean] * channels, "deviation": [deviation] * channels}
    return {
        "kind": "image" if inside is None else "pixels",
        "channels": mode,
        "orientation": "exif",
        "width": width,
        "height": height,
        "resize": "inside the file"
        if resized
        else "bilinear, antialiased, stretched, along rows and then along columns, each rounded to uint8",
        "jpeg_draft": DRAFT * max(width, height),
        **({} if inside else numbers),
        "steps": steps,
    }


def _sound(reader: SoundReader, inside: Preprocessing | None) -> Recipe:
    steps = [
        f"read a WAV of {reader.rate} samples a second as floats in [-1, 1], the mean of its channels",
        f"take the first {reader.length} samples, zeros behind what is shorter",
    ]
    recipe: Recipe = {"kind": "sound", "rate": reader.rate, "length": reader.length, "channels": "mean"}
    if reader.mels and inside is None:
        recipe |= {
            "mels": reader.mels,
            "window": reader.window,
            "step": reader.step,
            "frames": 1 + (reader.length - reader.window) // reader.step,
            "window_function": "hann, periodic: 0.5 - 0.5 cos(2 pi n / window)",
            "padding": "none",
            "power": 2,
            "mel_scale": "2595 log10(1 + f / 700), triangles of height 1 from 0 Hz to rate / 2, evenly spaced in mels",
            "log": "natural",
            "floor": FLOOR,
        }
        steps += [
            f"cut frames of {reader.window} samples, one every {reader.step}, each times the Hann window",
            "power = |DFT of the frame| squared, bins 0 to window // 2, at frequencies k * rate / window",
            f"mel = sum of power under each of {reader.mels} triangles with edges evenly spaced on the mel scale",
            f"x = ln(mel + {FLOOR:g}), as (1, 1, mel, frame)",
        ]
    else:
        steps.append("pass them as float32 (1, length)")
    return {**recipe, "steps": steps}


def _text(data: DataSpec, reader: TextReader, tokenizer: bytes) -> Recipe:
    length = data.shape[0]
    how = (
        "make tokens by the tokenizer, a JSON of the library tokenizers, without special tokens"
        if tokenizer
        else "take the bytes of its UTF-8 as tokens"
    )
    steps = [how, f"take the first {length} tokens, zeros behind what is shorter, as int64 (1, {length})"]
    if reader.mask:
        steps.append(f"{reader.mask} is 1 where there is a token and 0 behind them")
    return {
        "kind": "text",
        "tokens": "tokenizer" if tokenizer else "bytes",
        "length": length,
        "padding": 0,
        "vocabulary": data.below,
        "mask": reader.mask,
        "steps": steps,
        **({"tokenizer": msgspec.json.decode(tokenizer)} if tokenizer else {}),
    }


def _columns(reader: TableReader | SeriesReader, inside: Preprocessing | None) -> Recipe:
    recipe: Recipe = {"kind": "table", "columns": list(reader.columns)}
    steps = ["take the numbers of the columns in this order"]
    if isinstance(reader, SeriesReader):
        last = reader.channels_last
        recipe |= {"kind": "series", "window": reader.window, "channels_last": last}
        form = "(1, time, column)" if last else "(1, column, time)"
        steps.append(f"take {reader.window} rows in the order of time, as {form}")
    if inside is None and (reader.mean or reader.deviation):
        count = len(reader.columns)
        recipe |= {
            "mean": list(reader.mean or [0.0] * count),
            "deviation": list(reader.deviation or [1.0] * count),
        }
        steps.append("x = (number - mean) / deviation, for each column")
    return {**recipe, "steps": steps}
