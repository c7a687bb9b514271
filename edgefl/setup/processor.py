"""Which processor sums updates and evaluates models."""

from __future__ import annotations


def processor(device: str) -> str:
    """``auto`` is CUDA where there is one, else ``cpu``; every other device is itself."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
