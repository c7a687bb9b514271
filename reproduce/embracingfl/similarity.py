"""EmbracingFL's Figures 1 and 3: how alike clients' layers stay, by the part of the model that they average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import get_args

import numpy as np
import torch

from edgefl.data import datasets
from edgefl.data.dataset import Array, Dataset
from edgefl.data.partition import dirichlet
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.resnet import resnet20
from reproduce.embracingfl.partial_synchronization import Scheme, partial_sync, synchronised
from reproduce.embracingfl.small_models import pooled_resnet8
from reproduce.entry import Arm, ArmRun, Chart, Claim, Column, Computed, Entry, Measurements, Scale
from reproduce.results import Judged, Results, judge_factory

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
NAMES: Mapping[Scheme, str] = {
    "none": "no synchronisation",
    "second_half": "output-side half (EmbracingFL)",
    "first_half": "input-side half",
    "channel": "half of the channels",
}
INPUT, OUTPUT = "input side", "output side"
"""Figures: largest similarity over the pairs of clients at the first and the last layer probed, mean of the second half of
the measurements."""
LAYERS: Mapping[Scale, tuple[str, str]] = {
    "smoke": ("stem", "block3"),
    "cpu": ("stem", "block3"),
    "paper": ("block1.conv2", "block9.conv2"),
}
_CPU: Mapping[str, int | float | str] = {
    "data": "cifar10",
    "clients": 8,
    "samples": 4000,
    "rounds": 20,
    "every": 10,
    "batch": 32,
    "held_out": 64,
    "lr": 0.05,
}
SETTINGS: Mapping[Scale, Mapping[str, int | float | str]] = {
    "smoke": {**_CPU, "clients": 4, "samples": 200, "rounds": 2, "every": 1, "batch": 4, "held_out": 16},
    "cpu": _CPU,
    "paper": {**_CPU, "data": "cifar10_jpeg", "clients": 128, "samples": 0, "rounds": 100, "lr": 0.4},
}


def arms(scale: Scale) -> Sequence[Arm]:
    return [
        Computed(
            NAMES[scheme],
            partial(study, scheme),
            {"scheme": scheme, "layers": LAYERS[scale], **SETTINGS[scale]},
        )
        for scheme in SCHEMES
    ]


def study(scheme: Scheme, work: ArmRun) -> Measurements:
    """PARTIAL_SYNC_STUDY of embracingfl.md 2.10."""
    own = SETTINGS[work.scale]
    clients, rounds = int(own["clients"]), int(own["rounds"])
    data = datasets.load(str(own["data"])).limited(int(own["samples"]), 0, seed=work.seed)
    spec = _model(work.scale, data, work.seed)
    parts = dirichlet(data.train_y, clients, alpha=0.1, seed=work.seed, min_samples=2)
    first, last = LAYERS[work.scale]
    lines: dict[str, list[tuple[float, float]]] = {INPUT: [], OUTPUT: []}
    for found in partial_sync(
        spec,
        [_rows(data, part) for part in parts],
        [_held_out(data, work.seed, int(own["held_out"]))],
        synchronised(spec, scheme),
        rounds=rounds,
        every=int(own["every"]),
        batch=int(own["batch"]),
        lr=float(own["lr"]),
        layers=(first, last),
        seed=work.seed,
    ):
        work.progress(f"{NAMES[scheme]}, {found.step} steps")
        for side, layer in ((INPUT, first), (OUTPUT, last)):
            lines[side].append((float(found.step), found.layers[layer].largest))
    return Measurements(
        {side: float(np.mean([y for _, y in line[len(line) // 2 :]])) for side, line in lines.items()},
        dict(lines),
    )


def _model(scale: Scale, data: Dataset, seed: int) -> ModelSpec:
    if scale == "paper":
        return resnet20(classes=data.classes, seed=seed)
    widths = (4, 4, 8) if scale == "smoke" else (16, 32, 64)
    return pooled_resnet8(pool=4, widths=widths, seed=seed)


def _rows(data: Dataset, rows: Array) -> tuple[torch.Tensor, torch.Tensor]:
    batch = data.train_batch(rows)
    return torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])


def _held_out(data: Dataset, seed: int, count: int) -> torch.Tensor:
    rows = np.random.default_rng(seed).permutation(len(data.test_y))[:count]
    return torch.from_numpy(data.test_batch(rows)["x"])


@judge_factory
def _higher(results: Results, one: tuple[str, str], other: tuple[str, str]) -> Judged:
    """Figures (arm, side); the mean of the paired differences, and every seed's sign."""
    a, b = results.of(*one), results.of(*other)
    return Judged(bool((a - b).mean() > 0), f"{a.mean():.3f}, {b.mean():.3f}")


def _is_one(results: Results) -> Judged:
    found = results.of(NAMES["first_half"], INPUT)
    return Judged(bool(np.abs(found - 1).max() < 1e-4), f"{found.min():.6f}")


_EMBRACING, _FIRST, _CHANNEL, _NONE = (
    NAMES[scheme] for scheme in ("second_half", "first_half", "channel", "none")
)
ENTRY = Entry(
    name="embracingfl/svcca",
    what="EmbracingFL, Figures 1 and 3: SVCCA similarity of clients' layers under four ways to average a part of the model",
    arms=arms,
    columns=(Column(INPUT, "input side"), Column(OUTPUT, "output side")),
    claims=(
        Claim(
            "H6",
            "without synchronisation input-side layers stay more alike than output-side ones",
            "input > output on three tasks",
            _higher((_NONE, INPUT), (_NONE, OUTPUT)),
        ),
        Claim(
            "H6",
            "output-side layers stay more alike when the output-side half is averaged than when the input-side half is",
            "maintained, decays quickly",
            _higher((_EMBRACING, OUTPUT), (_FIRST, OUTPUT)),
            doubt="the layers that are never averaged rest on equal features here, and have not drifted far apart in 200 "
            "steps of a network of eight layers",
        ),
        Claim(
            "H6",
            "and more than when half of the channels are",
            "big gap at Conv 15 and 19",
            _higher((_EMBRACING, OUTPUT), (_CHANNEL, OUTPUT)),
        ),
        Claim("H6", "input-side layers that are averaged are equal", "exactly 1", _is_one, exact=True),
    ),
    charts=(
        Chart(
            "output-side.svg",
            "SVCCA of the last block, largest of all pairs",
            OUTPUT,
            x="local step",
            y="SVCCA",
        ),
        Chart(
            "input-side.svg",
            "SVCCA of the first layer, largest of all pairs",
            INPUT,
            x="local step",
            y="SVCCA",
        ),
    ),
    note=(
        "Means of the second half of the measurements, each the largest over all pairs of clients right after an "
        "average, on test images. At scale cpu: ResNet-8 on 8x8 means of the exact subset of CIFAR-10, stem and last "
        "block, 8 clients, Dirichlet 0.1, 20 averages 10 steps apart, learning rate 0.05 (not tuned); the paper: "
        "ResNet-20, 128 clients, 1,000 steps, curves only."
    ),
)
