"""What the users' label distributions say of their gradients and Hessians, from alike users to those of Table 1
(per_fedavg.md 6.2 and 6.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.analysis.heterogeneity.losses import DatasetShards, FlatLoss, ShardBatch, shuffle_rows
from edgefl.analysis.heterogeneity.report import HeterogeneityReport, examine
from edgefl.analysis.heterogeneity.theory import TrainingSetting
from edgefl.contract.tensors import Tensors
from edgefl.data import datasets
from edgefl.data.dataset import Array, Dataset
from edgefl.data.groups import groups
from edgefl.data.partition import histograms
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.basic import elu_mlp
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from reproduce.entry import Arm, ArmRun, Claim, Column, Computed, Entry, Measurements, Scale
from reproduce.results import Judged, Results, judge_factory, ordered

MIXED = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Share of each user's samples that is exchanged for samples of all users."""
USERS: Mapping[Scale, int] = {"smoke": 10, "cpu": 50, "paper": 50}
A: Mapping[Scale, int] = {"smoke": 8, "cpu": 68, "paper": 196}
SINGLES: Mapping[Scale, int] = {"smoke": 50, "cpu": 2_000, "paper": 10_000}
"""Samples of which B, the largest norm of one sample's gradient, is the maximum."""
CURVED: Mapping[Scale, int] = {"smoke": 2, "cpu": 10, "paper": 50}
TRAINING = {"steps": 300, "batch": 100, "lr": 0.1}
START, TRAINED = "start", "trained"

TV2, W1 = "mean TV^2", "W1 above chance"


def gradients(when: str) -> str:
    """The figure gamma_G^2 at the model ``when``, without the noise of few samples."""
    return f"gamma_G^2, {when}"


def _share(when: str) -> str:
    return f"of its bound, {when}"


def hessians(when: str) -> str:
    """The figure gamma_H^2."""
    return f"gamma_H^2, {when}"


def arm_of(mixed: float) -> str:
    """The name of an arm."""
    return f"{100 * mixed:g} % exchanged"


def exchanged(parts: Sequence[Array], share: float, seed: int) -> list[Array]:
    """``share`` of each user's rows, drawn at random, go into one pool, which is dealt back at random; every user keeps as
    many rows as it had."""
    rng = np.random.default_rng(seed)
    orders = [part[rng.permutation(len(part))] for part in parts]
    given = [round(share * len(order)) for order in orders]
    pool = rng.permutation(
        np.concatenate([order[:count] for order, count in zip(orders, given, strict=True)])
    )
    dealt = np.split(pool, np.cumsum(given)[:-1])
    return [
        np.concatenate([order[count:], own]) for order, count, own in zip(orders, given, dealt, strict=True)
    ]


def arms(scale: Scale) -> Sequence[Arm]:
    settings = {
        "users": USERS[scale],
        "a": A[scale],
        "singles": SINGLES[scale],
        "curved": CURVED[scale],
        **TRAINING,
    }
    return [Computed(arm_of(mixed), partial(study, mixed), {"mixed": mixed, **settings}) for mixed in MIXED]


def study(mixed: float, work: ArmRun) -> Measurements:
    """The dissimilarities of per_fedavg.md 6.6 at two models, which are the same for every share."""
    data = datasets.load("mnist").unit()
    whole = groups(data.train_y, USERS[work.scale], a=A[work.scale], seed=work.seed)
    parts = exchanged(whole, mixed, work.seed)
    spec = elu_mlp(seed=work.seed)
    objective = Objective.of(OutputSide(spec, 0))
    figures: dict[str, float] = {}
    for when, weights in ((START, spec.weights), (TRAINED, _trained(spec, data, whole, work.seed))):
        losses = FlatLoss(objective, weights)
        report = examine(
            losses,
            DatasetShards(data, shuffle_rows(parts, seed=work.seed)),
            histograms(data.train_y, parts, data.classes),
            TrainingSetting(alpha=0.01, beta=0.001, tau=4),
            curved=CURVED[work.scale],
            seed=work.seed,
        )
        figures |= _figures(report, when, _largest(losses, data, whole, work))
        work.progress(f"{arm_of(mixed)}, {when}")
    return Measurements(figures)


def _figures(report: HeterogeneityReport, when: str, largest: float) -> dict[str, float]:
    tv2, features = report.labels.mean_tv2, report.features
    return {
        TV2: tv2,
        W1: float(features.found.sliced.mean() - features.chance.sliced.mean()),
        gradients(when): report.gradients.unbiased,
        _share(when): report.gradients.unbiased / (4 * largest**2 * tv2),
        hessians(when): report.curvature.gamma_h2,
    }


def _trained(spec: ModelSpec, data: Dataset, parts: Sequence[Array], seed: int) -> Tensors:
    """After SGD on the samples of all users together."""
    rows = np.concatenate(parts)
    rng = np.random.default_rng(seed)
    weights = {name: tensor.clone().requires_grad_() for name, tensor in spec.weights.items()}
    for _ in range(int(TRAINING["steps"])):
        x, y = _batch(data, rng.choice(rows, int(TRAINING["batch"])))
        loss = F.cross_entropy(torch.func.functional_call(spec.module, weights, (x,)), y)
        for tensor, gradient in zip(
            weights.values(), torch.autograd.grad(loss, list(weights.values())), strict=True
        ):
            tensor.data -= TRAINING["lr"] * gradient
    return {name: tensor.detach() for name, tensor in weights.items()}


def _largest(losses: FlatLoss, data: Dataset, parts: Sequence[Array], work: ArmRun) -> float:
    """B, over some samples."""
    rows = np.random.default_rng(work.seed).permutation(np.concatenate(parts))[: SINGLES[work.scale]]
    x, y = _batch(data, rows)
    singles = (ShardBatch(number, x[number : number + 1], y[number : number + 1]) for number in range(len(y)))
    return max(float(losses.gradient(losses.start, each).norm()) for each in singles)


def _batch(data: Dataset, rows: Array) -> tuple[Tensor, Tensor]:
    given = data.train_batch(rows)
    return torch.from_numpy(given["x"]), torch.from_numpy(given["y"])


ALIKE, APART = arm_of(MIXED[0]), arm_of(MIXED[-1])
_ORDER = tuple(arm_of(mixed) for mixed in MIXED)
_WHEN = (START, TRAINED)


def _bounded(results: Results) -> Judged:
    """Below eq. 14's right side for every user distribution, model and seed."""
    found = [results.of(arm, _share(when)).max() for arm in _ORDER[1:] for when in _WHEN]
    return Judged(bool(max(found) <= 1), f"at most {100 * max(found):.2f} % of it")


def _vanishes(results: Results) -> Judged:
    """Judge whether it falls to at most 2 % of its value if all samples are exchanged."""
    shares = [
        float(results.of(ALIKE, gradients(when)).mean() / results.of(APART, gradients(when)).mean())
        for when in _WHEN
    ]
    return Judged(max(map(abs, shares)) <= 0.02, ", ".join(f"{100 * share:.2f} %" for share in shares))


@judge_factory
def _proportional(results: Results, when: str) -> Judged:
    """Least-squares exponent of gamma_G^2 in mean TV^2 over the distributions that differ."""
    tv2 = [results.mean(arm, TV2) for arm in _ORDER[1:]]
    found = [results.mean(arm, gradients(when)) for arm in _ORDER[1:]]
    exponent = float(np.polyfit(np.log(tv2), np.log(found), 1)[0])
    return Judged(0.8 <= exponent <= 1.2, f"exponent {exponent:.3f}")


ENTRY = Entry(
    name="per_fedavg/heterogeneity",
    what="Per-FedAvg, section 4.1: distances between the users' distributions against those of gradients and Hessians",
    arms=arms,
    columns=(
        Column(TV2, TV2),
        Column(W1, W1, digits=4),
        Column(gradients(START), gradients(START), digits=4),
        Column(gradients(TRAINED), gradients(TRAINED), digits=4),
        Column(_share(START), "% of its bound, start", 100.0),
        Column(_share(TRAINED), "% of its bound, trained", 100.0),
        Column(hessians(START), hessians(START)),
        Column(hessians(TRAINED), hessians(TRAINED)),
    ),
    claims=(
        Claim("8", "gamma_G^2 <= 4 B^2 mean TV^2", "eq. 14", _bounded),
        *(
            Claim(
                "8",
                f"gamma_G^2 grows with the users' distance, {when}",
                "eq. 14",
                ordered(_ORDER, gradients(when), unit=1.0, digits=4),
            )
            for when in _WHEN
        ),
        *(
            Claim(
                "8",
                f"gamma_G^2 is proportional to mean TV^2 (exponent 0.8 to 1.2), {when}",
                "eq. 14, an upper bound",
                _proportional(when),
            )
            for when in _WHEN
        ),
        Claim("8", "gamma_G^2 vanishes for users that are alike (2 % at most)", "", _vanishes),
        *(
            Claim(
                "8",
                f"gamma_H^2 grows with the users' distance, {when}",
                "eq. 14",
                ordered(_ORDER, hessians(when), unit=1.0),
            )
            for when in _WHEN
        ),
        Claim(
            "8",
            "sliced W1 of the images grows with them",
            "eq. 16",
            ordered(_ORDER, W1, unit=1.0, digits=4),
        ),
    ),
    note=(
        "Table 1's partition of MNIST (50 users, pixels in [0, 1], a = 68 at scale cpu), of which a share of every user's "
        "samples is exchanged at random. gamma_G^2 by disjoint halves of each user's samples, so that few samples do not "
        "look like differences; B is the largest gradient of 2,000 single samples; gamma_H^2 of 10 users. 'start': initial "
        "weights; 'trained': after 300 steps of SGD (batch 100, rate 0.1) on the samples of all users, the same model for "
        "every share. W1 is the mean over 64 random directions, less what the same samples give when they are shuffled "
        "over the users."
    ),
)
