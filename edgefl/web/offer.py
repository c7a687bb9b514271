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
    """A tier that a browser's user can choose.

    Attributes:
        name: name of the tier.
        prefix: prefix of the names of its devices.
        memory_bytes: memory in bytes that a device of the tier reports; 0 to report its real memory.
    """

    name: str
    prefix: str = PART
    memory_bytes: int = 0


class WebOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a federation from which the page makes a browser's configuration as a device.

    Attributes:
        federation: name of the federation.
        model: name of the model.
        broker: WebSocket URL of the broker; empty for the page's relay.
        login: True if the broker needs user and password.
        server_keys: public keys of servers.
        tiers: tiers to choose from.
        samples: rows of a sample file for browsers without data; 0 if there are none.
        photos: True if the model reads images.
        classes: names of the classes; empty if they only have numbers.
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
    """Return the tiers that browsers can join, in the order of the file.

    A tier with patterns of device names is left out unless one of them is a prefix followed by ``*``, which browsers
    can use in their names.
    """
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
        dataset: its dataset; None if this machine does not have it.
        rows: rows of a sample file (:func:`write_samples`).
        **more: further fields of :class:`WebOffer`.

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
    """Write up to 16 sample files with equally many training samples each.

    Devices of the run have the same rows, so the samples are for trying only and give no measure of accuracy.

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
    """Return the path of a sample file in ``folder`` for ``device``. It is the same in every call, because the data of a
    device must not change within a round.
    """
    files = sorted(folder.glob(_NAME.format("*")), key=lambda path: int(path.stem))
    number = int.from_bytes(hashlib.sha256(device.encode()).digest()[:4], "big")
    return files[number % len(files)]
