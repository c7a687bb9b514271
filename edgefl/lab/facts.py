"""Facts of a deployed file: model, inputs, preprocessing, origin, and the libraries that load it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from edgefl.data.dataset import Dataset
from edgefl.models.layers.log_mel import FLOOR
from edgefl.models.spec import ModelSpec
from edgefl.setup.model import data_spec
from edgefl.submodels.cost import macs
from edgefl.submodels.submodel import Submodel
from edgefl.system.distribution import NAME, version
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import ImageSpec, SeriesSpec, SoundSpec, TableSpec, TextSpec
from edgefl.wire.images import DRAFT
from edgefl.wire.tensors import Array
from edgefl_export.deploy.export import ExportedModel
from edgefl_export.deploy.program import (
    INPUT,
    MOST_ROWS,
    OUTPUT,
    PixelLayer,
    PreprocessingLayer,
    SoundLayer,
    raw_spec,
)

SCHEMA = 1
"""Version of the facts; grows when a key changes its meaning."""
_RANGE_ROWS = 1000
_FLOAT_SHARE = 0.05
"""Share of the weights that an operator may keep in float32 in an int8 file without a note."""


@dataclass(frozen=True)
class WeightsOrigin:
    """Origin of deployed weights.

    Attributes:
        federation: name of the federation.
        run: name of the run's folder.
        round: the last round in the weights; None if unknown.
        tier: tier of the submodel; "" for another choice.
    """

    federation: str = ""
    run: str = ""
    round: int | None = None
    tier: str = ""


def describe_file(
    spec: ModelSpec,
    dataset: Dataset,
    weights: Mapping[str, Array],
    submodel: Submodel,
    exported: ExportedModel,
    origin: WeightsOrigin,
    module: nn.Sequential,
) -> dict[str, Any]:
    """Return the facts of a deployed file that do not depend on its bytes, as JSON types by name.

    Args:
        spec: the whole model.
        dataset: its data.
        weights: its weights by name.
        submodel: the deployed part.
        exported: the exported file.
        origin: origin of the weights.
        module: the module that was exported.
    """
    data, target, layer = data_spec(dataset), exported.target, exported.program.subject.preprocessing
    values = list(module.parameters())
    recipe = recipe_of(data, pixels=dataset.pixels, tokenizer=dataset.tokenizer, inside=layer)
    notes = _notes(exported)
    return {
        "schema": SCHEMA,
        "model": model_name(spec.name),
        "federation": origin.federation,
        "run": origin.run,
        **({} if origin.round is None else {"round": origin.round}),
        "tier": origin.tier,
        "submodel": dict(submodel.identity),
        "producer": f"{NAME} {version()}",
        "runtime": dict(exported.runtime),
        "quantize": target.quantize,
        "batch": None if target.dynamic_batch else target.batch,
        "inputs": _inputs(dataset, data, exported, recipe),
        "output": {
            "name": OUTPUT,
            "dtype": "float32",
            "shape": [None if target.dynamic_batch else target.batch, *spec.boundary(len(spec.units)).shape],
            "classes": spec.classes,
        },
        **({"classes": list(data.names)} if data.names else {}),
        "preprocessing_inside": layer is not None,
        "parameters": sum(value.numel() for value in values),
        "nonzero": sum(int(value.count_nonzero()) for value in values),
        "macs": macs(module, spec.sample),
        "weights_sha256": digest(weights),
        "data": dataset.name,
        "max_rel_error": exported.max_rel_error,
        "checked_rows": exported.rows,
        **({"notes": notes} if notes else {}),
    }


def model_name(name: str) -> str:
    """Return the name of a model for display. Of ``path/file.py:factory``, the folder is removed."""
    place, colon, factory = name.rpartition(":")
    return f"{Path(place).name}:{factory}" if colon and place.endswith(".py") else name


def digest(weights: Mapping[str, Array]) -> str:
    """Return the SHA-256 (hexadecimal) of weights, computed over names, dtypes, shapes and bytes in the order of names."""
    found = hashlib.sha256()
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name])
        found.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def _inputs(
    dataset: Dataset, data: DataSpec, exported: ExportedModel, recipe: dict[str, Any]
) -> list[dict[str, Any]]:
    subject = exported.program.subject
    batch = None if exported.target.dynamic_batch else exported.target.batch
    found = []
    for own, spec in subject.inputs.items():
        layer = subject.preprocessing if own == INPUT else None
        raw = raw_spec(layer) if layer else spec
        shape: list[int | None] = [batch, *raw.shape]
        for axis in layer.dynamic if layer else ():
            shape[axis + 1] = None
        port = {
            "name": subject.name(own),
            "dtype": str(raw.dtype).removeprefix("torch."),
            "shape": shape,
            "range": _range(dataset, data, own, layer),
        }
        if own == INPUT:
            # The numbers of the first input are x * scale + shift of the data's.
            scaled = {} if layer else {"scale": float(dataset.scale), "shift": float(dataset.shift)}
            port |= layout_of(recipe["kind"], len(shape), recipe) | scaled | {"preprocessing": recipe}
        found.append(port)
    return found


def _range(dataset: Dataset, data: DataSpec, own: str, layer: PreprocessingLayer | None) -> list[float]:
    """Return [smallest, largest value] of the input ``own``: the limits of its type, or else the extremes in test rows."""
    if isinstance(layer, PixelLayer):
        return [0, 255]
    if isinstance(layer, SoundLayer):
        return [-1.0, 1.0]
    below = data.below if own == INPUT else next(each.below for each in data.others if each.name == own)
    if below:
        return [0, below - 1]
    if own == INPUT and dataset.pixels:
        return [data.shift, dataset.top * data.scale + data.shift]
    read = dataset.test_batch(np.arange(min(_RANGE_ROWS, len(dataset.test_y))))
    values = torch.from_numpy(read[own])
    if layer is not None:
        values = layer.raw(values)
    return [float(values.min()), float(values.max())]


def _notes(exported: ExportedModel) -> list[str]:
    target, layer = exported.target, exported.program.subject.preprocessing
    notes = []
    if target.preprocessing and layer is None:
        notes.append(
            "the preprocessing of these samples is not in the file: follow the recipe of the first input"
        )
    if isinstance(layer, PixelLayer) and not layer.resize:
        notes.append(
            "resizing is not in a .pte file, which takes images of one size: follow the recipe of the first input"
        )
    weights = sum(each.numel() for each in exported.program.subject.module.parameters())
    if kept := [name for name, count in exported.float_weights.items() if count > _FLOAT_SHARE * weights]:
        notes.append(f"int8 leaves the weights of {', '.join(kept)} in float32")
    if target.dynamic_batch and target.format == "executorch":
        notes.append(f"one call takes 1 to {MOST_ROWS} samples: memory is planned for the most")
    return notes


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
    data: DataSpec, *, pixels: bool, tokenizer: bytes, inside: PreprocessingLayer | None = None
) -> Recipe:
    """Return the preprocessing from a data file to the first input, as JSON types.

    The keys are ``kind``, the numbers of each step, and ``steps`` as text.

    Args:
        data: description of the model's samples.
        pixels: True if samples are images of whole numbers.
        tokenizer: JSON of the tokenizer of texts; empty if tokens are bytes.
        inside: preprocessing that the deployed file does itself; None for none.
    """
    reader = data.reader
    if pixels and (reader is None or isinstance(reader, ImageSpec)):
        return _image_recipe(data, inside)
    if isinstance(reader, SoundSpec):
        return _sound_recipe(reader, inside)
    if isinstance(reader, TextSpec):
        return _text_recipe(data, reader, tokenizer)
    if isinstance(reader, TableSpec | SeriesSpec):
        return _columns_recipe(reader, inside)
    return {
        "kind": "arrays",
        "scale": data.scale,
        "shift": data.shift,
        "steps": ["take the numbers as the training data have them; whole numbers become x * scale + shift"],
    }


def layout_of(kind: str, rank: int, recipe: Recipe) -> dict[str, Any]:
    """Return ``layout`` (such as ``NCHW``) and ``axes`` (their names) of an input; {} if they are unknown.

    Args:
        kind: kind of data in ``recipe``.
        rank: number of axes, batch included.
        recipe: preprocessing of the input.
    """
    if kind == "sound" and rank == 4:
        kind = "features"
    if kind == "series" and recipe.get("channels_last"):
        kind = "series, channels last"
    layout, axes = _AXES.get(kind, ("", ()))
    if kind == "sound" and rank == 3:
        layout, axes = "NCT", ("batch", "channel", "time")
    return {"layout": layout, "axes": list(axes)} if len(axes) == rank else {}


def _image_recipe(data: DataSpec, inside: PreprocessingLayer | None) -> Recipe:
    channels, height, width = data.shape
    white = data.reader.white if isinstance(data.reader, ImageSpec) else 255
    mode = "RGB" if channels == 3 else "L"
    size = f"{width} x {height}"
    resized = isinstance(inside, PixelLayer) and inside.resize
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


def _sound_recipe(reader: SoundSpec, inside: PreprocessingLayer | None) -> Recipe:
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


def _text_recipe(data: DataSpec, reader: TextSpec, tokenizer: bytes) -> Recipe:
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


def _columns_recipe(reader: TableSpec | SeriesSpec, inside: PreprocessingLayer | None) -> Recipe:
    recipe: Recipe = {"kind": "table", "columns": list(reader.columns)}
    steps = ["take the numbers of the columns in this order"]
    if isinstance(reader, SeriesSpec):
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
