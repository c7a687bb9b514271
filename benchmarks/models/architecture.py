"""An architecture: its constructor and its input."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from torch import nn

from edgefl.contract.tensors import TensorSpec

Library = Literal["plain", "transformers", "torchvision", "timm"]
LIBRARIES: tuple[Library, ...] = ("plain", "transformers", "torchvision", "timm")
OUTSIDE = LIBRARIES[1:]
"""Libraries that have to be installed."""
CLASSES = 4
VOCABULARY, LENGTH = 100, 16
IMAGE = TensorSpec((3, 32, 32))
LARGE_IMAGE = TensorSpec((3, 64, 64))
WORDS = TensorSpec((LENGTH,), torch.int64, VOCABULARY)
MASK = TensorSpec((LENGTH,), torch.int64, 2)


@dataclass(frozen=True)
class Architecture:
    """Model with its library's own dropout, stochastic depth, tied weights, caches and outputs.

    Attributes:
        kind: class or function that makes it.
        make: calls it with sizes alone.
        sample: one sample, or its inputs by the names of forward's parameters.
        classes: number of classes.
        loss: name in `edgefl ls losses`, "" for the default of the output.
    """

    library: Library
    name: str
    kind: str
    make: Callable[[], nn.Module]
    sample: TensorSpec | Mapping[str, TensorSpec]
    classes: int = CLASSES
    loss: str = ""

    @property
    def path(self) -> str:
        """Name of the architecture, ``library/name``."""
        return f"{self.library}/{self.name}"


def installed(library: Library) -> str:
    """Return the version of a library, "" if it is not installed; torch's for plain code."""
    try:
        return version("torch" if library == "plain" else library)
    except PackageNotFoundError:
        return ""


def called(library: Library, function: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """Return a constructor by ``function``, a dotted name below the package ``library``, which it imports."""

    def make() -> nn.Module:
        path, _, name = f"{library}.{function}".rpartition(".")
        model = getattr(importlib.import_module(path), name)(*args, **kwargs)
        assert isinstance(model, nn.Module)
        return model

    return make


def transformer(
    name: str,
    kind: str,
    config: Mapping[str, Any],
    sample: TensorSpec | Mapping[str, TensorSpec],
    classes: int = CLASSES,
    loss: str = "",
) -> Architecture:
    """Return a model of ``transformers`` by its class ``kind`` and the sizes of its configuration."""
    return Architecture("transformers", name, kind, configured(kind, **config), sample, classes, loss)


def configured(kind: str, **config: Any) -> Callable[[], nn.Module]:
    """Return the function that makes a model of ``transformers`` by its class and the sizes of its configuration."""

    def make() -> nn.Module:
        model = getattr(importlib.import_module("transformers"), kind)
        built = model(model.config_class(**config))
        assert isinstance(built, nn.Module)
        return built

    return make
