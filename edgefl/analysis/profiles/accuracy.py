"""The accuracy of each tier in a run: of its submodel on the test set, or of its devices while they trained."""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from edgefl.errors import ConfigError, DataError, EdgeflError
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.bundle.manifest import Manifest

_JOURNAL, _BUNDLES, _CONFIG = "journal.sqlite", "bundles/*.efl", "run.toml"
_METRICS = (
    "SELECT assignments.tier, updates.round, updates.metrics FROM updates JOIN assignments "
    "ON updates.run = assignments.run AND updates.round = assignments.round AND updates.device = assignments.device "
    "WHERE updates.reason = '' ORDER BY updates.round"
)


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers by tier; ``axis`` and ``note`` say of what, for a picture."""

    by_tier: Mapping[str, float]
    axis: str = "accuracy on the test set"
    note: str = "Accuracy: of what the tier's devices use of the run's model, on the test set."


def accuracy_of(run: Path) -> Accuracy:
    """What is known of the run in the folder ``run``: its model on the test set where both can be read here, else what
    devices told (:func:`tier_accuracy`). DataError if it is no run or tells neither."""
    try:
        from edgefl.lab.tier_accuracy import accuracy_on_test_set

        return Accuracy(accuracy_on_test_set(run))
    except (EdgeflError, OSError, ImportError) as error:  # a run of somebody else's data, or no torch
        why = error.message if isinstance(error, EdgeflError) else str(error)
        return Accuracy(
            tier_accuracy(run),
            "accuracy on the tier's training samples",
            "Accuracy: of the tier's devices on their own samples while they trained, in the last round that they "
            f"reported. Of the test set it cannot be told here: {why}",
        )


def check_same_model(run: Path, manifest: Manifest) -> None:
    """ConfigError unless the run in the folder ``run`` trained the model of this bundle: the accuracy of one model says
    nothing about another's memory. A run that tells neither by its bundles nor by its file is taken at its word."""
    own = [_model_of(each) for each in _manifests(run)]
    known = own or [(name, "") for name in _configured_model(run)]
    wanted = _model_of(manifest) if own else (manifest.model, "")
    if known and wanted not in known:
        raise ConfigError(
            f"the run in {run} trained {_told(known[0])}, and the bundle of tier {manifest.tier!r} holds {_told(wanted)}: "
            f"name bundles of that run, such as {run}/bundles, or the run of this model",
            run=str(run),
            trained=known[0][0],
            found=manifest.model,
        )
    trained = {each.parameters for each in _manifests(run) if each.tier == manifest.tier}
    if trained and manifest.parameters not in trained:
        raise ConfigError(
            f"tier {manifest.tier!r} trained {max(trained):,} entries in the run in {run}, and {manifest.parameters:,} in "
            f"the bundle: name bundles of that run, such as {run}/bundles, or a run with this tier",
            run=str(run),
            tier=manifest.tier,
            trained=max(trained),
            found=manifest.parameters,
        )


def _model_of(manifest: Manifest) -> tuple[str, str]:
    """The model's name, and what it reads and tells apart."""
    data = manifest.data
    return manifest.model, f"samples of shape {tuple(data.shape)} in {data.classes} classes"


def _told(model: tuple[str, str]) -> str:
    return " for ".join(filter(None, model))


def _manifests(run: Path) -> Iterator[Manifest]:
    return (read_bundle(path).manifest for path in sorted(run.glob(_BUNDLES)))


def _configured_model(run: Path) -> list[str]:
    """The model's name in the run's file, which `edgefl run` leaves there with every key."""
    try:
        return [str(tomllib.loads((run / _CONFIG).read_text(encoding="utf-8-sig"))["model"]["name"])]
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return []


def tier_accuracy(run: Path) -> dict[str, float]:
    """Share of training samples that each tier classified rightly in the last round that it reported.

    Devices report right answers by step, whose samples the run's bundles tell. DataError if ``run`` holds no journal (a
    server with a database of its own keeps it there) or no bundle, or nothing that says how many were right.
    """
    path = run / _JOURNAL
    if not path.is_file():
        raise DataError(
            f"{run} is no folder of a run: it holds no {_JOURNAL}; name what `edgefl run --out` was given",
            path=str(run),
        )
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as journal:
            rows = journal.execute(_METRICS).fetchall()
        reports = [(tier, number, json.loads(metrics).get("correct")) for tier, number, metrics in rows]
    except (sqlite3.Error, ValueError, AttributeError) as error:
        raise DataError(f"the journal of {run} cannot be read: {error}", path=str(path)) from error
    accuracies: dict[str, float] = {}
    for tier in {tier for tier, _, correct in reports if correct is not None}:
        last = max(number for other, number, correct in reports if other == tier and correct is not None)
        right = [
            correct
            for other, number, correct in reports
            if (other, number) == (tier, last) and correct is not None
        ]
        accuracies[tier] = sum(right) / len(right) / _batch(run)
    if not accuracies:
        raise DataError(
            f"no device of {run} told how many of its samples were right; train a classifier", path=str(path)
        )
    return accuracies


def _batch(run: Path) -> int:
    """Samples of a step, which all tiers of a run have in common."""
    for manifest in _manifests(run):
        return manifest.batch
    raise DataError(
        f"{run} holds no bundle ({_BUNDLES}), which would say how many samples a step had: name the folder that "
        "`edgefl run` made",
        path=str(run),
    )
