"""Somebody with a key of his own who speaks."""

from __future__ import annotations

from pathlib import Path

from edgefl.wire.keys import KeyPair
from edgefl.wire.mqtt.envelope import Sequence, Speaker


def speaker_in(path: Path, first: int = 1) -> Speaker:
    """Of the key in ``path``, which is made; its numbers begin with ``first``."""
    return Speaker(KeyPair(path), Sequence(lambda: first, lambda _: None, clock=lambda: 0.0))
