"""One architecture of the suite: how it is made, and what it reads."""

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
"""Those that have to be installed."""

CLASSES = 4
VOCABULARY, LENGTH = 100, 16
IMAGE = TensorSpec((3, 32, 32))
LARGE_IMAGE = TensorSpec((3, 64, 64))
WORDS = TensorSpec((LENGTH,), torch.int64, VOCABULARY)
MASK = TensorSpec((LENGTH,), torch.int64, 2)


@dataclass(frozen=True)
class Architecture:
    """A model as its library, or its author, makes it.

    ``kind`` is the class or function that makes it, ``make`` calls it with sizes and nothing else: dropout, stochastic
    depth, tied weights, caches and what it returns are the library's own. ``sample``: one sample, or its inputs by the names
    that forward gives them. ``classes``: how many a label chooses from. ``loss``: of `edgefl ls losses`, "" for the one that
    fits.
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
        """How it is asked for: ``library/name``."""
        return f"{self.library}/{self.name}"


def installed(library: Library) -> str:
    """The version of a library, "" if it is not installed; torch's for plain code."""
    try:
        return version("torch" if library == "plain" else library)
    except PackageNotFoundError:
        return ""


def called(library: Library, function: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """What makes a model by ``function``, a dotted name below the package ``library``, which is imported then."""

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
