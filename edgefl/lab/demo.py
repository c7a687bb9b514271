"""Defaults of `edgefl run` without a federation file, sized for a few minutes on two cores."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

SGD_RATE = 0.05
"""Learning rate of algorithms that take SGD's steps, by default."""

META = frozenset({"per_fedavg", "fedavg_update", "fedavg_matched"})
"""Algorithms whose default rate is the paper's, for a thousand rounds."""

ROUNDS = 10
STEPS = 20
"""Local steps of a round: twice those of a file, because a round of so small a model is mostly its messages.

FedBAT also learns step sizes in half of them (fedbat.md 9).
"""


CODEC_OPTIONS: Mapping[str, Mapping[str, object]] = {"fedbat": {"phi": 0.8}}
"""Codec options for few steps: half of 20 in full precision cost FedBAT a point (the paper has 50 steps and more)."""


def with_demo_defaults(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key: ``chosen`` ones of the command line, and the demo's for the rest."""
    model = str(chosen.get("model.name", "resnet8"))
    codec = dict(chosen.get("codec", {"name": "dense", "options": {}}))
    codec["options"] = {**CODEC_OPTIONS.get(codec["name"], {}), **codec["options"]}
    # Plain SGD, with which some local training begins, is not through in so few rounds.
    momentum = {} if "algorithm.name" in chosen else {"algorithm.momentum": 0.9}
    defaults: dict[str, Any] = momentum | {
        "federation.rounds": ROUNDS,
        "algorithm.steps": STEPS,
        "algorithm.lr": _learning_rate(str(chosen.get("algorithm.name", "sgd")), model),
        "data.train_samples": 6000,
        "data.test_samples": 2000,
        "data.alpha": 1.0,
        "round.lr_decay_at": (0.6,),
    }
    return defaults | dict(chosen) | {"codec": codec}


def _learning_rate(algorithm: str, model: str) -> float:
    """Return the algorithm's own rate, if it takes other steps than plain SGD's."""
    from edgefl.algorithms.catalog import ALGORITHMS

    factory = ALGORITHMS.get(algorithm)
    own = inspect.signature(factory).parameters.get("lr") if factory else None
    if own is not None and own.default not in (inspect.Parameter.empty, SGD_RATE) and algorithm not in META:
        return float(own.default)
    # Batch norm bears a large step; models without it do not.
    return 0.1 if model.startswith("resnet") else 0.02
