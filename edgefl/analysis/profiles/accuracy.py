"""Accuracy of each tier in a run: of its submodel on the test set, or of its devices during training."""

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
class TierAccuracy:
    """Accuracy of the tiers of a run, for a chart.

    Attributes:
        by_tier: accuracy from 0 to 1, by tier.
        axis: label of the axis.
        note: explanation below the chart.
    """

    by_tier: Mapping[str, float]
    axis: str = "accuracy on the test set"
    note: str = "Accuracy: of what the tier's devices use of the run's model, on the test set."


def accuracy_of(run: Path) -> TierAccuracy:
    """Return the accuracy of each tier in a run.

    The model is evaluated on the test set if model and test set can be read here. Otherwise the accuracies that devices
    reported during training are used (:func:`tier_accuracy`).

    Args:
        run: folder of the run.

    Returns:
        The accuracies, with texts that name their source.

    Raises:
        DataError: if the folder is not one of a run, or holds no accuracy.
    """
    try:
        from edgefl.lab.deployment import accuracy_on_test_set

        return TierAccuracy(accuracy_on_test_set(run))
    except (EdgeflError, OSError, ImportError) as error:  # a run of somebody else's data, or no torch
        why = error.message if isinstance(error, EdgeflError) else str(error)
        return TierAccuracy(
            tier_accuracy(run),
            "accuracy on the tier's training samples",
            "Accuracy: of the tier's devices on their own samples while they trained, in the last round that they "
            f"reported. The accuracy on the test set is unknown here: {why}",
        )


def check_same_model(run: Path, manifest: Manifest) -> None:
    """Check that a run trained a bundle's model, because another model's accuracy and memory are unrelated.

    A run without bundles and without a readable file passes.

    Args:
        run: folder of the run.
        manifest: manifest of the bundle.

    Raises:
        ConfigError: if the run trained another model, or other tensors in this tier.
    """
    own = [_model_of(each) for each in _manifests(run)]
    known = own or [(name, "") for name in _configured_model(run)]
    wanted = _model_of(manifest) if own else (manifest.model, "")
    if known and wanted not in known:
        raise ConfigError(
            f"the run in {run} trained {_model_text(known[0])}, and the bundle of tier {manifest.tier!r} holds "
            f"{_model_text(wanted)}: name bundles of that run, such as {run}/bundles, or the run of this model",
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
    """Return (name of the model, description of its samples and classes) of a bundle."""
    data = manifest.data
    return manifest.model, f"samples of shape {tuple(data.shape)} in {data.classes} classes"


def _model_text(model: tuple[str, str]) -> str:
    return " for ".join(filter(None, model))


def _manifests(run: Path) -> Iterator[Manifest]:
    return (read_bundle(path).manifest for path in sorted(run.glob(_BUNDLES)))


def _configured_model(run: Path) -> list[str]:
    """Return a list with the name of the model in the run's configuration, or [] if it cannot be read."""
    try:
        return [str(tomllib.loads((run / _CONFIG).read_text(encoding="utf-8-sig"))["model"]["name"])]
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return []


def tier_accuracy(run: Path) -> dict[str, float]:
    """Return each tier's accuracy on training samples in the last round that it reported.

    Devices report right answers per step; the run's bundles hold the number of samples of a step.

    Args:
        run: folder of the run.

    Returns:
        Accuracy from 0 to 1 by tier.

    Raises:
        DataError: if the folder holds no journal (a server's own database has it then), no bundle, or no right answers.
    """
    path = run / _JOURNAL
    if not path.is_file():
        raise DataError(
            f"{run} is no folder of a run: it holds no {_JOURNAL}; name what `edgefl run --out` was given",
            path=str(run),
            missing=_JOURNAL,
        )
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as journal:
            rows = journal.execute(_METRICS).fetchall()
        reports = [(tier, number, json.loads(metrics).get("correct")) for tier, number, metrics in rows]
    except (sqlite3.Error, ValueError, AttributeError) as error:
        raise DataError(
            f"the journal of {run} cannot be read: {error}", path=str(path), error=str(error)
        ) from error
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
            f"no device of {run} reported how many of its samples were right; train a classifier",
            path=str(path),
        )
    return accuracies


def _batch(run: Path) -> int:
    """Return the number of samples of a training step, which is equal in all tiers of a run.

    Raises:
        DataError: if the run has no bundle.
    """
    for manifest in _manifests(run):
        return manifest.batch
    raise DataError(
        f"{run} holds no bundle ({_BUNDLES}), which would say how many samples a step had: name the folder that "
        "`edgefl run` made",
        path=str(run),
        missing=_BUNDLES,
    )
