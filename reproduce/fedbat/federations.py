"""Federations of FedBAT's tables: data sets, partitions, methods and sizes (fedbat.md 3 and 4).

Scale cpu: the CNN with a quarter of its channels, 40 rounds of 10 clients, 40 local steps of 16 samples, 2,000 test images;
the baselines' fixed step sizes come from `fedbat/pilot`. All clients make the same number of local steps: at scale paper
that of ten epochs on the mean client. Accuracy: mean over the last tenth of the rounds; the paper does not name the round.
Claims are about Non-IID-2 if they name no other partition; EF, Noisy and Stoc are the sign methods of these names.

Fashion-MNIST, 100 clients, Non-IID-2, seed 100; a tenth of the training samples is the validation data. The paper searched
1, 0.1, 0.01 and 0.001 at its own size, and found 0.001 for SignSGD and 0.01 for Noisy- and Stoc-SignSGD; over fewer rounds
SignSGD's has to be larger. ZeroFL's sparse training leaves too few weights in so narrow a net.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgefl.api.simulate import Simulation
from reproduce import entry
from reproduce.entry import Claim, Entry, Federated, Grid, Lead, Measurements, Scale, Settings

DATA: Mapping[str, tuple[str, str, int, Mapping[int, int]]] = {
    "Fashion-MNIST": ("fashion_mnist", "fedbat_cnn", 100, {30: 320, 100: 100, 200: 50}),
    "CIFAR-10": ("cifar10_jpeg", "resnet10", 200, {30: 270, 100: 80, 200: 40}),
}
"""Data at hand: name, the paper's model, rounds, and local steps of ten epochs on the mean client by number of clients."""
PARTITIONS: Mapping[str, Settings] = {
    "IID": {"data.partition": "iid"},
    "Non-IID-1": {"data.partition": "dirichlet", "data.alpha": 0.3},
    "Non-IID-2": {"data.partition": "labels", "data.labels_per_device": 3},
}
ALL_DATA = ("Fashion-MNIST", "SVHN", "CIFAR-10", "CIFAR-100")
COLUMNS = [f"{data}, {partition}" for data in ALL_DATA for partition in PARTITIONS]
METHODS = ("FedAvg", "SignSGD", "EF-SignSGD", "Noisy-SignSGD", "Stoc-SignSGD", "ZeroFL", "FedBAT")
CODECS: Mapping[str, tuple[str, Settings]] = {
    "FedAvg": ("dense", {}), "SignSGD": ("signsgd", {"alpha": 0.001}), "EF-SignSGD": ("ef_signsgd", {}),
    "Noisy-SignSGD": ("noisy_signsgd", {"alpha": 0.01, "sigma": 0.01}), "Stoc-SignSGD": ("stoc_signsgd", {"alpha": 0.01}),
    "ZeroFL": ("zerofl", {"sparsity": 0.97}), "FedBAT": ("fedbat", {"rho": 6.0, "phi": 0.5}),
    "FedPAQ 3b": ("fedpaq", {"bits": 3}), "FedPAQ 4b": ("fedpaq", {"bits": 4}),
    "BiFL": ("bifl", {}), "BiFL-Full": ("bifl_full", {}),
}  # fmt: skip
"""Codec of each method, with the paper's options. A variant of FedBAT is called by its option, such as ``rho=0``."""
SIZES = (0.1, 0.01, 0.001)
CANDIDATES: Mapping[str, Mapping[str, Settings]] = {
    **{method: {str(a): {"alpha": a} for a in SIZES} for method in ("SignSGD", "Stoc-SignSGD")},
    "Noisy-SignSGD": {str(a): {"alpha": a, "sigma": a} for a in SIZES},
    "ZeroFL": {"sparse": {}, "dense": {"sparse_training": False}},
}
"""Settings that ``fedbat/pilot`` tries at scale cpu: step sizes, and ZeroFL's training."""
CHOSEN = {"SignSGD": "0.01", "Noisy-SignSGD": "0.01", "Stoc-SignSGD": "0.01", "ZeroFL": "dense"}
"""Choice of the pilot."""
CONSTANT: Settings = {
    "algorithm.lr": 0.1, "algorithm.momentum": 0.0, "algorithm.weight_decay": 0.0, "algorithm.batch": 64,
    "round.weighting": "samples", "round.weight_cap": 0, "data.test_samples": 0,
}  # fmt: skip
REDUCED: Mapping[Scale, Settings] = {
    "smoke": {
        "federation.rounds": 2, "algorithm.batch": 4, "algorithm.steps": 4, "data.train_samples": 200,
        "data.test_samples": 50, "round.fraction": 0.5, "tiers": {"all": {"count": 4, "devices": ["all-*"]}},
    },
    "cpu": {"federation.rounds": 40, "algorithm.batch": 16, "algorithm.steps": 40, "data.test_samples": 2000},
}  # fmt: skip
NOTE, _PILOT_NOTE = entry.notes_of(__doc__)


def arm(data: str, clients: int, partition: str, method: str) -> str:
    """Return the name of an arm."""
    return f"{data}, N={clients}, {partition}: {method}"


def federated(data: str, clients: int, partition: str, method: str, scale: Scale) -> Federated:
    """Return an arm: its data, their distribution over ``clients``, and the method."""
    (name, model, rounds, steps), paper = DATA[data], scale == "paper"
    codec, options = CODECS.get(method, CODECS["FedBAT"])
    if method not in CODECS:
        changed, value = method.split("=")
        options = {**options, changed: float(value)}
    model_options: Settings = {"initial": "torch"}
    if not paper:
        image = {"in_channels": 3, "size": 32} if data == "CIFAR-10" else {}
        widths = [8, 16, 32, 64] if scale == "cpu" else [2, 4, 8, 16]
        model, model_options = "fedbat_cnn", {**model_options, **image, "widths": widths}
        options = {**options, **CANDIDATES.get(method, {}).get(CHOSEN.get(method, ""), {})}
    if codec not in {"dense", "bifl", "bifl_full"}:  # statistics of batch norm are float32 with all methods
        options = {**options, "statistics": 32}
    settings: Settings = {
        **CONSTANT, **PARTITIONS[partition], "data.name": name, "model.name": model, "model.options": model_options,
        "federation.rounds": rounds, "algorithm.steps": steps[clients], "codec.name": codec, "codec.options": options,
        "round.fraction": 10 / clients, "round.evaluate_every": 2 if paper else 1,
        "tiers": {"all": {"count": clients, "devices": ["all-*"]}}, **REDUCED.get(scale, {}),
    }  # fmt: skip
    return Federated(arm(data, clients, partition, method), settings, measured)


def measured(simulation: Simulation) -> Measurements:
    """Return the simulation's curves, and as figure ``mean`` the mean accuracy over all its rounds."""
    found = entry.curves(simulation)
    mean = float(np.mean([accuracy for _, accuracy in found.lines["accuracy"]]))
    return Measurements(found.figures | {"mean": mean}, found.lines)


def by_method(clients: int, paper: Mapping[str, Sequence[float]]) -> Grid:
    """Return the table of all data sets and partitions for a number of clients, with the paper's numbers by method."""

    def cell(method: str, column: str) -> tuple[str, str]:
        data, partition = column.split(", ")
        return arm(data, clients, partition, method), "accuracy"

    return entry.grid("method", COLUMNS, paper, cell, title=f"{clients} clients (CIFAR-10: ours is JPEG q75)")


def ahead(
    better: str, others: Sequence[str], paper: str, *, partition: str = "Non-IID-2", data: str = "Fashion-MNIST",
    clients: int = 100, margin: float | None = None, figure: str = "accuracy",
) -> Claim:  # fmt: skip
    """Return the claim that a method is ahead of each of ``others``, or within ``margin`` of them."""
    one, *rest = (arm(data, clients, partition, method) for method in (better, *others))
    relation = "ahead of" if margin is None else f"within {100 * margin:g} pt of"
    text = f"{better} {relation if figure == 'accuracy' else 'by round above'} {', '.join(others)}"
    text = text.replace("-SignSGD", "") + (f", {partition}" if partition != "Non-IID-2" else "")
    return Claim(text, [Lead(one, other, figure) for other in rest], paper=paper, margin=margin)


def pilot_arms(scale: Scale) -> list[Federated]:
    """Return an arm for each candidate."""
    found = []
    for method, values in CANDIDATES.items():
        base = federated("Fashion-MNIST", 100, "Non-IID-2", method, scale)
        for value, options in values.items():
            codec = {**CODECS[method][1], **options, "statistics": 32}
            changed = {"codec.options": codec, "data.validation": 0.1}
            found.append(Federated(f"{method}: {value}", {**base.settings, **changed}, base.measure))
    return found


PILOT = Entry(
    "fedbat/pilot", "Pilot: step sizes of the baselines at scale cpu", pilot_arms,
    choices=[entry.Choice(each, {value: f"{each}: {value}" for value in values}) for each, values in CANDIDATES.items()],
    note=_PILOT_NOTE, seeds=entry.ONCE,
)  # fmt: skip
