"""All of them."""

from __future__ import annotations

from edgefl.suite.architecture import Architecture
from edgefl.suite.held_out.plain import PLAIN, TIMM, TORCHVISION
from edgefl.suite.held_out.transformer_library import OTHERS, TEXTS

HELD_OUT: tuple[Architecture, ...] = (*PLAIN, *TEXTS, *OTHERS, *TORCHVISION, *TIMM)
