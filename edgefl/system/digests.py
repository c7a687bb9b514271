"""Digests of plain values."""

from __future__ import annotations

import hashlib

import msgspec


def digest_of(values: object) -> str:
    """SHA-256 of what JSON can hold, dataclasses among it, whatever the order of keys."""
    return hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()
