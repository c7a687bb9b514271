"""The accuracy of each tier in a run: of its submodel on the test set, or of its devices while they trained."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.errors import DataError, EdgeflError

_JOURNAL, _BUNDLES = "journal.sqlite", "bundles/*.efl"
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
    for path in sorted(run.glob(_BUNDLES)):
        return read_bundle(path).manifest.batch
    raise DataError(
        f"{run} holds no bundle ({_BUNDLES}), which would say how many samples a step had: name the folder that "
        "`edgefl run` made",
        path=str(run),
    )
