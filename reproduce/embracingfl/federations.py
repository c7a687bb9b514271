"""Federations of strong, moderate and weak clients, for EmbracingFL and for width reduction (embracingfl.md 3.6, 9.2).

Scale paper, 3 seeds: about 340 core-hours for Table 6 and 420 for Table 2 (170 and 210 h on 2 cores, 6 and 7 h on 64)
from rounds of 4 clients: 85 ms a step of all strong, 50 of case 7. GPU: not measured.

Accuracy on a tenth of the training samples, which no client has; seed 100, which no table uses. All strong clients (case
1), and case 7 (12.5 % strong, 87.5 % weak) of both methods. A rate of 0.05 was tried as well and was worse than 0.1 for each
of the three: 49.7, 45.5 and 35.3 %. The strong clients alone take the rate of all strong. At scale paper all rates are the
paper's 0.4.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.layers.norms import BnMode
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.resnet import resnet8, resnet20
from reproduce.entry import JPEG, ONCE, Choice, Contrast, Entry, Federated, Lead, Scale, notes_of

ALL_STRONG, EMBRACING, WIDTH = "all strong", "EmbracingFL", "width reduction"
TIERS = ("strong", "moderate", "weak")
WIDTHS: dict[str, float] = {"strong": 1.0, "moderate": 0.45, "weak": 0.2}
"""Channels that width reduction keeps (embracingfl.md 5)."""
Table = dict[str, Any]
Mix = tuple[int, int, int]
"""Strong, moderate and weak clients, in sixteenths of all."""
CASES: dict[int, Mix] = {
    1: (16, 0, 0), 2: (8, 8, 0), 3: (4, 12, 0), 4: (2, 14, 0), 5: (8, 0, 8),
    6: (4, 0, 12), 7: (2, 0, 14), 8: (4, 4, 8), 9: (2, 4, 10), 10: (2, 2, 12),
}  # fmt: skip
CHOSEN: dict[str, float] = {ALL_STRONG: 0.4, EMBRACING: 0.2, WIDTH: 0.2}
"""Learning rates at the scales smoke and cpu, which :data:`PILOT` chooses."""
HOURS, _PILOT_NOTE = notes_of(__doc__)

COMMON: Table = {
    "algorithm.batch": 32, "algorithm.momentum": 0.9, "algorithm.weight_decay": 1e-4, "data.partition": "dirichlet",
    "data.name": "cifar10_jpeg", "round.evaluate_every": 5, "round.lr_decay_at": [0.8, 0.9],
}  # fmt: skip
_CPU: Table = COMMON | {
    "data.train_samples": 30_000, "data.alpha": 0.5, "algorithm.steps": 10, "federation.rounds": 60, "round.fraction": 0.5,
    "model.name": f"{__name__}:pooled", "model.options": {"pool": 2},
}  # fmt: skip
IMAGES: dict[Scale, Table] = {
    "smoke": _CPU | {
        "algorithm.batch": 4, "algorithm.steps": 1, "data.train_samples": 640, "data.test_samples": 100,
        "federation.rounds": 2, "round.evaluate_every": 1, "model.options": {"pool": 4},
    },
    "cpu": _CPU,
    "paper": COMMON | {
        "algorithm.steps": 10, "data.alpha": 0.1, "data.test_samples": 0, "federation.rounds": 1000, "round.fraction": 0.25,
        "model.name": "resnet20", "model.options": {},
    },
}  # fmt: skip


def pooled(*, model: str = "resnet8", pool: int = 2, bn: BnMode = "global", seed: int = 0) -> ModelSpec:
    """Return a ResNet for CIFAR-10 that reads means of ``pool`` x ``pool`` pixels; ResNet-8 has 78,330 parameters."""
    build = {"resnet8": resnet8, "resnet20": resnet20}[model]
    whole = build(in_channels=3, size=32 // pool, bn=bn, seed=seed)
    (first, stem), *rest = whole.module.named_children()
    module = sequential([(first, nn.Sequential(nn.AvgPool2d(pool), stem)), *rest])
    return ModelSpec(f"pooled {model}", module, TensorSpec((3, 32, 32)), 10)


def tiers(scale: Scale, mix: Mix, submodels: dict[str, Table]) -> dict[str, Table]:
    """Return the table of tiers; clients that are missing to 16 sixteenths hold samples, and never take part."""
    unit, shares = 8 if scale == "paper" else 2, zip((*TIERS, "absent"), (*mix, 16 - sum(mix)), strict=True)
    own = {tier: {"count": share * unit, "devices": [f"{tier}-*"]} for tier, share in shares if share}
    return {tier: table | submodels.get(tier, {}) for tier, table in own.items()}


def images(
    scale: Scale, mix: Mix, method: str = EMBRACING, *, bn: str = "", everyone: bool = False, lr: float = 0.0
) -> Table:
    """Return the settings of an image federation.

    Args:
        scale: Size of the run.
        mix: Clients of each tier.
        method: ``EmbracingFL`` or ``width reduction``.
        bn: Batch norm, ``global`` or ``static``; default: the method's own in the paper's main tables.
        everyone: True: all clients are in each round; False: a share of them.
        lr: Learning rate; default: the paper's, or the pilot's choice.
    """
    cuts = (4, 7) if scale == "paper" else (2, 3)
    submodels: dict[str, Table] = {"moderate": {"cut": cuts[0]}, "weak": {"cut": cuts[1], "chunks": 2}}
    if method == WIDTH:
        options = {tier: {"ratio": WIDTHS[tier], "rounding": "floor"} for tier in TIERS[1:]}
        submodels = {tier: {"kind": "width", "options": own} for tier, own in options.items()}
    own_norm = {"bn": bn or ("static" if method == WIDTH else "global")}
    chosen = 0.4 if scale == "paper" else CHOSEN[method if any(mix[1:]) else ALL_STRONG]
    settings = IMAGES[scale] | {"algorithm.lr": lr or chosen, "tiers": tiers(scale, mix, submodels)}
    settings |= {"round.fraction": 1.0} if everyone else {}
    settings |= {"simulation.absent": ["absent-*"]} if sum(mix) < 16 else {}
    return settings | {"model.options": settings["model.options"] | own_norm}


def ahead(better: str, worse: str) -> Contrast:
    """Return the contrast between two arms' best accuracies, which the paper reports."""
    return Lead(better, worse, "best")


RATES = (0.1, 0.2, 0.4)
CANDIDATES = {ALL_STRONG: (1, EMBRACING), EMBRACING: (7, EMBRACING), WIDTH: (7, WIDTH)}
"""Case and submodels by the method whose rate is chosen."""


def pilot_arms(scale: Scale) -> list[Federated]:
    """Return an arm for each method and rate."""
    return [
        Federated(f"{name}, {lr:g}", images(scale, CASES[case], method, lr=lr) | {"data.validation": 0.1})
        for name, (case, method) in CANDIDATES.items()
        for lr in RATES
    ]


PILOT = Entry(
    "embracingfl/pilot", "Pilot: learning rates", pilot_arms,
    choices=[Choice(name, {f"{lr:g}": f"{name}, {lr:g}" for lr in RATES}) for name in CANDIDATES],
    note=_PILOT_NOTE, other_data=JPEG, seeds=ONCE,
)  # fmt: skip
