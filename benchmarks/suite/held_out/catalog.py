"""All of them."""

from __future__ import annotations

from benchmarks.suite.architecture import Architecture
from benchmarks.suite.held_out.plain import PLAIN, TIMM, TORCHVISION
from benchmarks.suite.held_out.transformer_library import OTHERS, TEXTS

HELD_OUT: tuple[Architecture, ...] = (*PLAIN, *TEXTS, *OTHERS, *TORCHVISION, *TIMM)
