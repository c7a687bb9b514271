"""Processor that sums updates and evaluates models: CPU or GPU."""

from __future__ import annotations

import re

from edgefl.errors import ConfigError

_NAME = re.compile(r"auto|cpu|cuda(:\d+)?")


def check_device(device: str) -> None:
    """Raise ConfigError unless ``device`` is ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. Loads no torch."""
    if not _NAME.fullmatch(device):
        raise ConfigError(
            f"expected the device auto, cpu or cuda, found {device!r}; choose one of them", device=device
        )


def processor(device: str) -> str:
    """Return the name of the torch device: ``cuda`` for ``auto`` if there is a GPU, else ``cpu``.

    Raises:
        ConfigError: the name is unknown, or torch finds no GPU for ``cuda``.
    """
    check_device(device)
    if device == "cpu":
        return device
    import torch

    there = torch.cuda.is_available()
    if device != "auto" and not there:
        raise ConfigError(
            f"the device is {device}, and torch finds no NVIDIA GPU here; choose auto or cpu",
            device=device,
            gpus=0,
        )
    return device if device != "auto" else "cuda" if there else "cpu"
