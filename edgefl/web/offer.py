"""Offer of a federation to browsers, and samples for browsers without data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgefl.config import Federation, TierTable
from edgefl.data.dataset import Dataset

PART = "web-"
"""Part of every browser's name, after its tier's prefix."""


class OfferedTier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier to choose.

    Attributes:
        name: name of the tier.
        prefix: prefix of the names of its devices.
        memory_bytes: memory that a device of the tier reports; 0 for its own.
    """

    name: str
    prefix: str = PART
    memory_bytes: int = 0


class WebOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Offer of a federation, from which the page makes a device's configuration.

    Attributes:
        federation: name of the federation.
        model: name of the model.
        broker: WebSocket URL, or empty for the page's relay.
        login: the broker needs user and password.
        server_keys: public keys of servers.
        tiers: tiers to choose from.
        samples: rows of a sample for browsers without data; 0 for none.
        photos: True if the model reads images.
        classes: names of the classes; empty for numbers.
        mirrors: URLs of mirrors of the weights.
    """

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
    """Return the tiers that browsers can choose, by name or by memory, in the order of the file."""
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


def offer_of(federation: Federation, dataset: Dataset | None, rows: int, **more: Any) -> WebOffer:
    """Return the offer of ``federation`` to browsers.

    Args:
        federation: the federation.
        dataset: its dataset, if this machine has it.
        rows: rows of a sample.
        **more: further fields of the offer.

    Returns:
        The offer.
    """
    return WebOffer(
        federation=federation.federation.name,
        model=federation.model.name,
        tiers=tiers_of(federation),
        samples=rows,
        photos=dataset is not None and dataset.pixels,
        classes=() if dataset is None else dataset.names,
        mirrors=federation.downlink.mirrors,
        **more,
    )


SLICES, MOST_ROWS = 16, 256
_NAME = "{}.npz"


def write_samples(folder: Path, dataset: Dataset, seed: int) -> int:
    """Write up to 16 files of equally many training samples.

    Devices of the run have the same rows, so the samples are for trying only and say nothing about accuracy.

    Args:
        folder: folder of the files.
        dataset: the training samples.
        seed: seed of the draw.

    Returns:
        Rows of each file; 0 without samples.
    """
    count = len(dataset.train_y)
    slices = min(SLICES, count)
    rows = min(MOST_ROWS, count // slices) if slices else 0
    drawn = np.random.default_rng([seed, 0x3EB]).permutation(count)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(slices):
        own = np.sort(drawn[number * rows : (number + 1) * rows])
        dataset.write_device(folder / _NAME.format(number), own)
    return rows


def sample_of(folder: Path, device: str) -> Path:
    """Return the sample file of a device, the same in every call, because its data must not change within a round."""
    files = sorted(folder.glob(_NAME.format("*")), key=lambda path: int(path.stem))
    number = int.from_bytes(hashlib.sha256(device.encode()).digest()[:4], "big")
    return files[number % len(files)]
