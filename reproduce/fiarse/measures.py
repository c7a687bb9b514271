"""Measurements of a finished federation for FIARSE's tables and figures (fiarse.md 2.11, A12)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from math import sqrt
from statistics import fmean

import numpy as np

from edgefl.api.simulate import Simulation
from edgefl.data.partition import histograms
from edgefl.lab.deployment import ROWS, DeploymentBuilder, deployed_submodel
from edgefl.setup.data import open_data, partition
from edgefl.setup.model import federation_model
from edgefl.setup.tiers import device_names
from edgefl.submodels.importance.submodel import Importance
from edgefl.submodels.standalone import FIRST_ROUND
from edgefl.submodels.submodel import Submodel
from edgefl.wire import tensors
from edgefl.wire.tensors import Array, Arrays
from reproduce.entry import Measurements, tail

POINTS = 13
"""Most models of a run that are evaluated."""
LAST = 0.25
"""Share of them, the last ones, over which figures are means: few clients of few classes make one round an accident."""
LAGS = (1, 10)
"""Distances of the models whose masks are compared; the second stands for the specification's 50."""
TARGET = 0.7
"""Accuracy of the paper's Figures 3 and 6, to which rounds are counted."""
BINS = np.linspace(0, 1, 21)
Lines = dict[str, list[tuple[float, float]]]


def label(gamma: float) -> str:
    """Return the name of a size in figures: a power of two as ``1/16``, others as ``0.36``."""
    inverse = 1 / gamma
    return f"1/{inverse:.0f}" if inverse in (2, 4, 8, 16, 32, 64) else f"{gamma:g}"


class SubmodelAccuracy:
    """Accuracies of submodels of a simulation's model as ``edgefl deploy`` exports them.

    Batch norms have statistics of one batch of training samples, taken with the submodel itself (fiarse.md A11).
    """

    def __init__(self, simulation: Simulation) -> None:
        self.federation = simulation.federation
        self.dataset = open_data(self.federation)
        self.spec = federation_model(self.federation, self.dataset)
        names = device_names(self.federation)
        parts = partition(self.federation, self.dataset, len(names), warn=lambda _: None)
        counts = histograms(self.dataset.train_y, parts, self.dataset.classes)
        self._mixes = counts / counts.sum(axis=1, keepdims=True)
        self._tiers = np.array([name.rpartition("-")[0] for name in names])
        self._tests = np.bincount(self.dataset.test_y, minlength=self.dataset.classes)

    def by_class(self, submodel: Submodel, weights: Mapping[str, Array], number: int = FIRST_ROUND) -> Array:
        """Return the share of each class's test samples that a submodel classifies correctly, float64 (classes,).

        A rolling window is where round ``number`` has it.
        """
        of = DeploymentBuilder(self.spec, self.dataset, weights, samples=ROWS, federation=self.federation)
        right = self.dataset.test_y[of.right(of.module(submodel, number))]
        return np.bincount(right, minlength=self.dataset.classes) / np.maximum(self._tests, 1)

    def overall(self, by_class: Array) -> float:
        """Return the accuracy on the test set."""
        return float(by_class @ self._tests / self._tests.sum())

    def local(self, tier: str, by_class: Array) -> Array:
        """Return the accuracy of each client of ``tier`` on test samples with its mix of classes, float64 (clients,)."""
        return np.asarray(self._mixes[self._tiers == tier] @ by_class)


def accuracies(simulation: Simulation) -> Measurements:
    """Return accuracies of trained and of other sizes, as means over the last models that were evaluated.

    Figures, shares: ``global g`` and ``local g`` (test set; the mixes of classes of this size's clients), ``global`` and
    ``local`` (means over the sizes), ``half``, ``quarter`` (parts of the smallest size), ``between`` (geometric means of
    two neighbours), ``median client`` (local accuracy). ``smallest`` is another name of the smallest size, ``gap`` by how
    much it is above the largest. ``rounds below 1``, ``rounds 1``: first round with a global accuracy of :data:`TARGET`.
    Curves: ``global g`` by round, ``sizes`` (accuracy by size), ``clients`` (number of clients by local accuracy in
    percent), and those of :func:`exploration`. Windows of a rolling submodel are where the last round trained them.
    """
    judge, table = SubmodelAccuracy(simulation), simulation.federation.tiers
    tiers = dict(sorted((each.gamma or 1.0, name) for name, each in table.items()))
    smallest, tier = next(iter(tiers.items()))
    cut = partial(deployed_submodel, judge.federation, judge.spec)
    cuts = {gamma: cut(tier=name) for gamma, name in tiers.items()}
    unseen = {"quarter": [smallest / 4], "half": [smallest / 2]}
    unseen["between"] = [sqrt(low * high) for low, high in pairwise(tiers)]
    others = {gamma: cut(tier=tier, gamma=gamma) for each in unseen.values() for gamma in each}
    evaluated = list(simulation.kept)[::-1][:: -(-len(simulation.kept) // POINTS)][::-1]
    lines: Lines = {}
    clients = []
    for number in evaluated:
        weights = tensors.load(simulation.kept[number].read_bytes())
        place = number if table[tier].options.get("rolling") else FIRST_ROUND
        found = {gamma: judge.by_class(each, weights, place) for gamma, each in cuts.items()}
        row = {f"global {label(gamma)}": judge.overall(each) for gamma, each in found.items()}
        row["global"] = fmean(row.values())
        if number in evaluated[-max(1, int(len(evaluated) * LAST)) :]:
            local = {gamma: judge.local(tiers[gamma], each) for gamma, each in found.items()}
            clients.append(np.concatenate(list(local.values())))
            row |= {f"local {label(gamma)}": float(each.mean()) for gamma, each in local.items()}
            row["local"] = fmean(each.mean() for each in local.values())
            for gamma, each in others.items():
                row[f"unseen {gamma}"] = judge.overall(judge.by_class(each, weights, place))
        for name, value in row.items():
            lines.setdefault(name, []).append((float(number), value))
    figures = {name: tail(line, LAST if name.startswith("global") else 1.0) for name, line in lines.items()}
    sizes = {gamma: figures[f"global {label(gamma)}"] for gamma in cuts}
    sizes |= {gamma: figures.pop(f"unseen {gamma}") for gamma in others}
    figures |= {name: fmean(sizes[gamma] for gamma in each) for name, each in unseen.items()}
    for kind in ("global", "local"):
        figures[f"{kind} smallest"] = figures[f"{kind} {label(smallest)}"]
        figures[f"{kind} gap"] = figures[f"{kind} smallest"] - figures[f"{kind} {label(max(tiers))}"]
    *below, whole = (reached(lines[f"global {label(gamma)}"]) for gamma in tiers)
    of_clients = np.mean(clients, axis=0)
    figures |= {"rounds below 1": fmean(below), "rounds 1": whole}
    figures["median client"] = float(np.median(of_clients))
    lines = {name: line for name, line in lines.items() if name.startswith("global")}
    counts = np.histogram(of_clients, BINS)[0]
    lines["sizes"] = sorted(sizes.items())
    lines["clients"] = list(zip(100 * BINS[1:], map(float, counts), strict=True))
    if masked := {gamma: each for gamma, each in cuts.items() if isinstance(each, Importance)}:
        start = {name: tensor.numpy() for name, tensor in judge.spec.weights.items()}
        models = ((number, tensors.load(path.read_bytes())) for number, path in simulation.kept.items())
        moved = exploration(start, models, masked)
        figures |= {name: tail(line) for name, line in moved.items()}
        figures |= {f"first {name}": tail(line[::-1]) for name, line in moved.items()}
        lines |= moved
    return Measurements(figures, lines)


def reached(line: list[tuple[float, float]]) -> float:
    """Return the first x where a curve is at :data:`TARGET` or above; without any the end and the first x more."""
    return next((x for x, y in line if y >= TARGET), line[-1][0] + line[0][0])


def exploration(
    start: Arrays, models: Iterable[tuple[int, Arrays]], cuts: Mapping[float, Importance]
) -> Lines:
    """Return by round how submodels move (fiarse.md A12).

    Curves: ``ever trained`` (share of the maskable entries that any update has changed); ``explored g`` (share that the
    mask of size g has held in any round so far); ``moved h g`` (part of the mask that differs from that ``h`` models
    before).

    Args:
        start: Initial weights, by name.
        models: Number of the round and weights after it, in order.
        cuts: Submodel of each size.
    """
    lines: Lines = {}
    held: dict[float, Array] = {}
    before, ever = start, np.zeros(1, bool)
    past: dict[float, deque[Array]] = {gamma: deque(maxlen=max(LAGS) + 1) for gamma in cuts}
    for number, weights in models:
        masks = {gamma: cut.cut_of(before).masks for gamma, cut in cuts.items()}
        ever = ever | _flat({name: weights[name] != before[name] for name in next(iter(masks.values()))})
        row = {"ever trained": float(ever.mean())}
        for gamma, mask in ((gamma, _flat(each)) for gamma, each in masks.items()):
            held[gamma] = held.get(gamma, mask) | mask
            past[gamma].append(mask)
            row[f"explored {label(gamma)}"] = float(held[gamma].mean())
            for lag in (lag for lag in LAGS if lag < len(past[gamma])):
                differing = (mask ^ past[gamma][-1 - lag]).sum()
                row[f"moved {lag} {label(gamma)}"] = float(differing / (2 * mask.sum()))
        for name, value in row.items():
            lines.setdefault(name, []).append((float(number), value))
        before = weights
    return lines


def _flat(arrays: Mapping[str, Array]) -> Array:
    return np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)])
