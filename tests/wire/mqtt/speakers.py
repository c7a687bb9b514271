"""Somebody with a key of his own who speaks."""

from __future__ import annotations

from pathlib import Path

from edgefl.wire.keys import KeyPair
from edgefl.wire.mqtt.envelope import MessageCounter, MessageSigner


def speaker_in(path: Path, first: int = 1) -> MessageSigner:
    """Of the key in ``path``, which is made; its numbers begin with ``first``."""
    return MessageSigner(KeyPair(path), MessageCounter(now=first / 1_000_000))
