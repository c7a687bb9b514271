"""Facts of a deployed file: what it is, how it is fed, and what loads it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edgefl.data.dataset import Dataset
from edgefl.lab.facts import layout_of, recipe_of
from edgefl.models.spec import ModelSpec
from edgefl.setup.samples import data_spec
from edgefl.submodels.cost import macs
from edgefl.submodels.submodel import Submodel
from edgefl.system.distribution import NAME, version
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.tensors import Array
from edgefl_export.deploy.export import ExportedModel
from edgefl_export.deploy.program import INPUT, MOST_ROWS, OUTPUT, Pixels, Preprocessing, Waves, raw_spec

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


def described(
    spec: ModelSpec,
    dataset: Dataset,
    weights: Mapping[str, Array],
    submodel: Submodel,
    exported: ExportedModel,
    origin: WeightsOrigin,
    module: nn.Sequential,
) -> dict[str, Any]:
    """Return the facts that do not depend on the bytes of the file.

    Args:
        spec: the whole model.
        dataset: its data.
        weights: its weights.
        submodel: the deployed part.
        exported: the file before its metadata are known.
        origin: where the weights come from.
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
    """Return the name of a model without the folder of its factory's file."""
    place, colon, factory = name.rpartition(":")
    return f"{Path(place).name}:{factory}" if colon and place.endswith(".py") else name


def digest(weights: Mapping[str, Array]) -> str:
    """Return the SHA-256 of weights: names, shapes and bytes, by name."""
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


def _range(dataset: Dataset, data: DataSpec, own: str, layer: Preprocessing | None) -> list[float]:
    """Return the least and the largest value: of the data's type where it bounds them, else of test rows."""
    if isinstance(layer, Pixels):
        return [0, 255]
    if isinstance(layer, Waves):
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
    if isinstance(layer, Pixels) and not layer.resize:
        notes.append(
            "resizing is not in a .pte file, which takes images of one size: follow the recipe of the first input"
        )
    weights = sum(each.numel() for each in exported.program.subject.module.parameters())
    if kept := [name for name, count in exported.float_weights.items() if count > _FLOAT_SHARE * weights]:
        notes.append(f"int8 leaves the weights of {', '.join(kept)} in float32")
    if target.dynamic_batch and target.format == "executorch":
        notes.append(f"one call takes 1 to {MOST_ROWS} samples: memory is planned for the most")
    return notes
