"""What a federation offers to browsers: the page asks for it, and makes a device's configuration of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from edgefl.config import Federation, TierTable
from edgefl.data.dataset import Dataset

PART = "web-"
"""Of every browser's name, behind what makes it one of its tier."""


class OfferedTier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier that a person may choose. ``prefix``: a device whose name begins with it belongs to the tier. ``memory_bytes``:
    what a device of the tier reports, 0 for what it has."""

    name: str
    prefix: str = PART
    memory_bytes: int = 0


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """``broker``: a WebSocket URL, or empty for this page's own way. ``login``: the broker asks for user and password.
    ``samples``: rows of the sample that a browser without data of its own may train on, 0 for none. ``photos``: the model
    reads images. ``classes``: their names, empty for numbers. ``mirrors``: where weights are found beside the broker."""

    federation: str
    model: str = ""
    broker: str = ""
    login: bool = False
    server_keys: tuple[str, ...] = ()
    tiers: tuple[OfferedTier, ...] = ()
    samples: int = 0
    photos: bool = False
    classes: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()


def tiers_of(federation: Federation) -> tuple[OfferedTier, ...]:
    """Those that a browser can be one of, by name or by memory, the smallest last as the file has them."""
    return tuple(offered for name, table in federation.tiers.items() for offered in _offered(name, table))


def _offered(name: str, table: TierTable) -> Iterable[OfferedTier]:
    if not table.devices:
        yield OfferedTier(name=name, memory_bytes=table.memory_bytes)
        return
    for pattern in table.devices:
        prefix = pattern.removesuffix("*")
        if pattern.endswith("*") and not set("*?[") & set(prefix):
            yield OfferedTier(name=name, prefix=prefix + PART)
            return


def offer_of(federation: Federation, dataset: Dataset | None, rows: int, **more: Any) -> Offer:
    """What browsers are told of ``federation``. ``dataset``: its data, where this machine has them; ``rows`` of a sample."""
    return Offer(
        federation=federation.federation.name,
        model=federation.model.name,
        tiers=tiers_of(federation),
        samples=rows,
        photos=dataset is not None and dataset.pixels,
        classes=() if dataset is None else dataset.names,
        mirrors=federation.downlink.mirrors,
        **more,
    )
