"""What ``--engine``, ``--format`` and ``--target`` take. Typer before 0.19, which flwr asks for, knows no Literal."""

from __future__ import annotations

from enum import StrEnum

from edgefl.wire.bundle.formats import FORMATS

Engine = StrEnum("Engine", FORMATS)
