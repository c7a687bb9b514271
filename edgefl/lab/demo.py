"""What `edgefl run` does without a federation file: sized so that two cores finish in a few minutes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEPS = 10
"""Local steps of a round."""

TRAINED_STEPS = 20
"""The same under a codec that is part of the training: FedBAT learns its step sizes in half of them (fedbat.md 9)."""


def demo_defaults(chosen: Mapping[str, Any]) -> dict[str, object]:
    """Settings beside those that were ``chosen`` on the command line, both by dotted key.

    ConfigError for a codec that does not exist.
    """
    from edgefl.codecs.catalog import build

    model = str(chosen.get("model.name", "resnet8"))
    codec = chosen.get("codec", {"name": "dense", "options": {}})
    trained = build(codec["name"], **codec["options"]).training is not None
    # Plain SGD, with which some local training begins, is not through in 30 rounds.
    momentum = {} if "program.name" in chosen else {"program.momentum": 0.9}
    return momentum | {
        "federation.rounds": 30,
        "program.steps": TRAINED_STEPS if trained else STEPS,
        # Batch norm bears a large step; models without it do not.
        "program.lr": 0.1 if model.startswith("resnet") else 0.02,
        "data.train_samples": 6000,
        "data.test_samples": 2000,
        "data.alpha": 1.0,
        "round.lr_decay_at": (0.6,),
    }
