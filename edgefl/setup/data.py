"""Data of a run on one machine: one dataset, distributed over the devices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgefl.config import DataTable, Federation
from edgefl.data import datasets, photos, tables
from edgefl.data.dataset import Array, Dataset
from edgefl.data.equal import dirichlet_clients, dirichlet_equal, paired, similarity
from edgefl.data.groups import groups
from edgefl.data.partition import by_labels, by_owners, by_shards, dirichlet, histograms, iid, match_shares
from edgefl.data.text import corpora, samples, vocabulary
from edgefl.data.text.corpora import Corpus
from edgefl.errors import ConfigError, DataError
from edgefl.wire.bundle.readers import TableSpec, TextSpec

# Rows that a Dirichlet draw leaves each device at least: as benchmarks have it (fedbat.md 4.2), or if no draw does, two.
WANTED_SAMPLES = 10
FEWEST_SAMPLES = 2

Warn = Callable[[str], None]


def warn_on_stderr(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def data_table(data: object) -> dict[str, Any]:
    """Return the keys of the table ``[data]`` for a dataset's name, or for the path of a file or folder.

    Raises:
        ConfigError: if ``data`` is neither text nor a path.
    """
    if not isinstance(data, str | Path):
        raise ConfigError(
            f"argument `data` is {type(data).__name__}; give a dataset's name, or a file: `Dataset.save(path)` writes one",
            argument="data",
        )
    if isinstance(data, Path) or data.lower().endswith((".npz", ".csv", ".jsonl")) or Path(data).is_dir():
        return {"name": "file", "file": str(Path(data).resolve())}
    return {"name": data}


def open_data(federation: Federation) -> Dataset:
    """Load the dataset of the table ``[data]``, scaled, split and limited as the table says. It may be downloaded.

    Raises:
        DataError: if its files are missing or damaged, or too small for its validation split.
    """
    table = federation.data
    directory = Path(table.dir) if table.dir else None
    if table.name == "file":
        loaded = _load_own(table, federation.federation.seed)
    elif table.name in corpora.CORPORA:
        target = (directory or datasets.download_folder()) if table.download else None
        corpus = corpora.load(table.name, datasets.places(directory), target)
        loaded = _texts(table, corpus, federation.federation.seed)
    else:
        loaded = datasets.load(table.name, directory, download=table.download)
    if reader := table.way_to_read:
        loaded = replace(loaded, reader=reader)
    scaled = loaded.unit() if table.scale == "unit" else loaded
    test_samples = table.test_samples
    if table.validation:
        # Before the limit of training samples, which depends on the seed.
        scaled, test_samples = scaled.validation_split(table.validation, test_samples), 0
    return scaled.limited(table.train_samples, test_samples, seed=federation.federation.seed)


def _load_own(table: DataTable, seed: int) -> Dataset:
    """Load the samples of the user's own file, or of a folder of photos. ``seed``: seed of the division into train and
    test.

    Raises:
        ConfigError: if the reader in the table is for devices' files only.
    """
    file = Path(table.file)
    if file.is_dir():
        return photos.load(file, table.size, seed)
    if not tables.is_table(file):
        return Dataset.load(file)
    reader = table.way_to_read or tables.reader_of(file, table.label or "label")
    spread = not table.devices_dir
    if isinstance(reader, TableSpec):
        return tables.load(file, reader, seed, standardize=not table.reader, train=spread)
    if isinstance(reader, TextSpec):
        loaded = _texts(table, tables.load_texts(file, reader, seed, train=spread), seed)
        return replace(loaded, reader=msgspec.structs.replace(reader, mask=next(iter(loaded.others), "")))
    raise ConfigError(
        f"{file}: a reader of kind {table.reader['kind']!r} reads files of devices, expected kind table or text for one "
        "file; give each device its own file (data.devices_dir), and the server an .npz",
        kind=table.reader["kind"],
    )


def _texts(table: DataTable, corpus: Corpus, seed: int) -> Dataset:
    """Convert a corpus of texts to samples of token numbers, for the task and with the tokens that the table names."""
    whole = table.tokens == "bytes" or (table.tokens == "auto" and corpus.name == "Tiny Shakespeare")
    task = table.task if table.task != "auto" else "class" if corpus.classes else "next"
    words = vocabulary.separated if table.name == "wikitext2" else vocabulary.words
    known = (
        vocabulary.Vocabulary()
        if whole
        else vocabulary.cached_vocabulary(words, corpus.train.texts, table.vocabulary)
    )
    length, encode = table.length, known.encoder()
    if task == "next":
        made = samples.window_samples(corpus, encode, length=length, vocabulary=known.size)
    else:
        if not table.validation:  # a validation split comes before the limits
            corpus = corpus.limited(table.train_samples, table.test_samples, seed)
        made = samples.text_samples(corpus, encode, length=length, vocabulary=known.size, mask=table.mask)
    return replace(made, reader=TextSpec(mask=next(iter(made.others), "")), tokenizer=known.tokenizer)


def partition(
    federation: Federation, dataset: Dataset, devices: int, *, warn: Warn = warn_on_stderr
) -> list[Any]:
    """Distribute the training samples over the devices as ``[data]`` says.

    Args:
        federation: settings.
        dataset: the samples.
        devices: number of devices.
        warn: called with a text if devices get fewer samples than they should.

    Returns:
        Indices of the training samples of each device, int64.

    Raises:
        ConfigError: if devices have their own data (``data.devices_dir``).
        DataError: if the samples cannot be distributed so; the message has a remedy.
    """
    table, labels, seed = federation.data, dataset.train_y, federation.federation.seed
    if table.devices_dir:
        raise ConfigError(
            f"devices have their own data in {table.devices_dir} (data.devices_dir): no samples are spread that could be "
            "compared; `edgefl device personalize --data` adapts the model to one device"
        )
    how = how_spread(table, dataset)
    if len(labels) == 0:
        raise DataError(
            f"{dataset.name} has no training samples to spread over {devices} devices: add train_x and train_y, name the "
            "folder with what each device holds (data.devices_dir), or run `edgefl server` with devices that have their own",
            data=dataset.name,
            devices=devices,
        )
    if how == "dirichlet":
        return _dirichlet(table, labels, devices, seed, warn)
    if how == "groups":
        return groups(labels, devices, a=table.group_samples, single_class=table.single_class, seed=seed)
    spread: dict[str, Callable[..., list[Array]]] = {
        "iid": iid,
        "owners": partial(by_owners, owners=np.asarray(dataset.owners)),
        "labels": partial(by_labels, per_client=table.labels_per_device),
        "shards": partial(by_shards, per_client=table.shards_per_device),
        "similarity": partial(similarity, percent=table.similarity),
        "dirichlet_equal": partial(dirichlet_equal, alpha=table.alpha),
        "dirichlet_clients": partial(dirichlet_clients, alpha=table.alpha),
        "paired": paired,
    }
    return list(spread[how](labels, devices, seed=seed))


def how_spread(table: DataTable, dataset: Dataset) -> str:
    """Return the name of the partition to use. ``auto`` is replaced by the one that suits the dataset.

    Raises:
        ConfigError: if the dataset lacks what the partition needs, such as classes or owners.
    """
    classed = has_classes(dataset)
    if table.partition == "auto":
        return "dirichlet" if classed else "owners" if dataset.owners is not None else "iid"
    if table.partition == "owners" and dataset.owners is None:
        raise ConfigError(f"{dataset.name} does not say whose its samples are: choose another data.partition")
    if table.partition not in ("iid", "owners") and not classed:
        raise ConfigError(
            f"data.partition {table.partition!r} goes by the class of a sample, and those of {dataset.name} have none: "
            'choose "owners" or "iid"',
            data=dataset.name,
            partition=table.partition,
        )
    return table.partition


def has_classes(dataset: Dataset) -> bool:
    """Return True if each sample has one class as its label: int64 labels (n,)."""
    return dataset.train_y.ndim == 1 and dataset.train_y.dtype == np.int64


def _rows_of_owners(owners: Array, test_owners: Array, parts: list[Any]) -> list[Any]:
    """Return, for each device, the indices of the test samples of those owners that have its training samples.

    Args:
        owners: owner of each training sample.
        test_owners: owner of each test sample.
        parts: indices of each device's training samples.

    Raises:
        DataError: if a device would get no sample.
    """
    rows = [np.flatnonzero(np.isin(test_owners, owners[part])) for part in parts]
    if empty := [device for device, own in enumerate(rows) if not len(own)]:
        raise DataError(
            f"{len(empty)} of {len(parts)} devices have no test sample of their own owners: use more samples "
            "(data.test_samples), or fewer devices",
            empty=tuple(empty),
        )
    return rows


def own_data(federation: Federation, devices: Sequence[str]) -> dict[str, Path]:
    """Return the path of each device's own data in ``data.devices_dir``, by device.

    The file or folder has the name of the device, with any ending. Without that setting, return {}.

    Raises:
        DataError: if the folder is missing, or a device has no file or several.
    """
    if not federation.data.devices_dir:
        return {}
    folder = Path(federation.data.devices_dir)
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder} with the devices' data: correct data.devices_dir, or leave it out to have the "
            "samples of the dataset spread",
            path=str(folder),
        )
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    places: dict[str, Path] = {}
    for device in devices:
        own = [path for path in entries if (path.name if path.is_dir() else path.stem) == device]
        if len(own) != 1:
            found = ", ".join(path.name for path in own or entries) or "nothing"
            raise DataError(
                f"device {device} has one file or folder of its name in {folder}, found {found}: give it its data, or "
                "change the count of its tier",
                device=device,
                path=str(folder),
            )
        places[device] = own[0]
    return places


def held_out(federation: Federation, dataset: Dataset, parts: list[Any]) -> list[Any]:
    """Return the indices of each device's test samples, disjoint and distributed like its training samples.

    They belong to the same owners if samples were distributed by owners. Else they have the same class proportions if
    samples have classes, else equal numbers. Partition ``groups`` uses ``group_test_samples``; all others as many as
    possible.

    Args:
        federation: settings.
        dataset: the samples.
        parts: indices of each device's training samples.

    Raises:
        DataError: if a device would get no sample.
    """
    table, seed = federation.data, federation.federation.seed
    how = how_spread(table, dataset)
    if how == "owners" and dataset.owners is not None and dataset.test_owners is not None:
        return _rows_of_owners(dataset.owners, dataset.test_owners, parts)
    if not has_classes(dataset):
        return list(iid(dataset.test_y, len(parts), seed=seed))
    if how == "groups":
        most, single = table.group_test_samples, table.single_class
        return list(groups(dataset.test_y, len(parts), a=most, single_class=single, seed=seed))
    wanted = histograms(dataset.train_y, parts, dataset.classes)
    return list(match_shares(dataset.test_y, wanted, seed=seed))


def _dirichlet(table: DataTable, labels: Array, devices: int, seed: int, warn: Warn) -> list[Any]:
    spread = partial(dirichlet, labels, devices, alpha=table.alpha, seed=seed)
    with suppress(DataError):
        return list(spread(min_samples=WANTED_SAMPLES))
    parts = list(spread(min_samples=FEWEST_SAMPLES))
    warn(
        f"no Dirichlet draw with data.alpha {table.alpha:g} gives each of {devices} devices {WANTED_SAMPLES} of "
        f"{len(labels)} samples; the smallest now has {min(map(len, parts))}. Raise data.alpha or data.train_samples, or "
        "take fewer devices"
    )
    return parts
