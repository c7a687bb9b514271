"""Federations of FAFED's experiments: the settings that all methods share, and the options of each.

The paper's grid for each method and level of Table 2. In full it has 480 runs. Here one option is varied at a time,
with the others at the centre, so a choice of several options may not have been tried as a whole. Runs are Table 2's,
with 10 epochs instead of 30 and a tenth of the training samples (6,000) for validation. The accuracy on these decides,
in the mean over the last tenth of the rounds: one seed, whose standard error is near half a point. All methods but
FAFED take the grid's largest step, so a larger one might serve them better. Run it with `--seeds 100`, which no table
uses.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from edgefl.api.simulate import Simulation
from edgefl.setup.data import open_data
from edgefl.setup.evaluation import evaluation
from edgefl.setup.model import federation_model
from edgefl.setup.training import algorithm_of
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire import tensors
from reproduce import entry
from reproduce.entry import Claim, Entry, Federated, Lead, Scale, Settings, tail
from reproduce.fafed.models import CIFAR_CNN, FASHION_CNN, MNIST_CNN

SGD = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}
METHODS: dict[str, Settings] = {
    "FedAvg": SGD, "SCAFFOLD": {"name": "scaffold"}, "STEM": {"name": "stem"},
    "FedAdam": SGD, "FedAMS": SGD, "FAFED": {"name": "fafed"},
}  # fmt: skip
"""Algorithm of the clients by method, in the order of the paper's table."""
OTHERS = [*METHODS][:-1]
"""All methods but FAFED."""
SERVER = {"server_lr": "lr", "beta1": "beta1", "beta2": "beta2"}
"""Names of the options of the server's optimizer. A method's other options are of the clients' algorithm."""
TAU = 0.01
"""tau of FedAdam and FedAMS, as rho of FAFED (fafed.md 4.4)."""

LEVELS: dict[str, tuple[str, int, int, int]] = {
    "low": ("similarity", 5, 20, 20),
    "medium": ("dirichlet_equal", 50, 10, 10),
    "high": ("paired", 100, 5, 4),
}
"""Partition, b and q by level of heterogeneity, and the clients that the simulator trains at a time."""
IMAGES = {
    "fashion_mnist": (FASHION_CNN, 3_000), "mnist": (MNIST_CNN, 3_000), "cifar10_jpeg": (CIFAR_CNN, 2_500),
}  # fmt: skip
"""Model, and training samples of a client."""
SIZES: dict[Scale, tuple[int, int]] = {"smoke": (2, 1), "cpu": (10, 10), "paper": (20, 30)}
"""Clients and epochs."""

CHOSEN: dict[str, dict[str, tuple[float, float, float]]] = {
    "FedAvg": {"lr": (0.1, 0.1, 0.1)},
    "SCAFFOLD": {"lr": (0.1, 0.1, 0.1)},
    "STEM": {"lr": (0.1, 0.1, 0.1), "alpha": (0.9, 0.1, 0.1)},
    "FedAdam": {"lr": (0.1, 0.1, 0.1), "server_lr": (0.0316, 0.0316, 0.0316),
                "beta1": (0.9, 0.9, 0.9), "beta2": (0.1, 0.1, 0.1)},
    "FedAMS": {"lr": (0.1, 0.1, 0.1), "server_lr": (0.0316, 0.0316, 0.0316),
               "beta1": (0.1, 0.1, 0.1), "beta2": (0.9, 0.9, 0.9)},
    "FAFED": {"lr": (0.01, 0.01, 0.02), "alpha": (0.9, 0.9, 0.9), "beta": (0.9, 0.1, 0.1)},
}  # fmt: skip
"""Settings of each method at low, medium and high heterogeneity: the choice of :data:`PILOT`."""


def shared_settings(clients: int, rounds: int, **data: Any) -> dict[str, Any]:
    """Return the settings that all methods have: all clients in every round, and some 90 models kept for the loss."""
    keep = max(1, rounds // 90)
    return {f"data.{name}": value for name, value in data.items()} | {
        "federation.rounds": rounds, "round.evaluate_every": 2 * keep, "simulation.keep_every": keep,
        "tiers": {"strong": {"count": clients, "devices": ["strong-*"]}},
    }  # fmt: skip


def image_settings(data: str, scale: Scale, level: str) -> dict[str, Any]:
    """Return the settings that all methods share on images."""
    (model, samples), (clients, epochs) = IMAGES[data], SIZES[scale]
    partition, batch, steps, at_a_time = LEVELS[level]
    rounds, train, test = epochs * samples // (batch * steps), clients * samples, 0
    if scale == "smoke":
        rounds, batch, steps, train, test = 4, 4, 2, 200, 100
    return {
        **shared_settings(clients, rounds, name=data, partition=partition, train_samples=train, test_samples=test),
        "algorithm": {"batch": batch, "steps": steps},
        "model.name": model, "model.options": {"initial": "torch"},
        "simulation.together": min(at_a_time, clients),
    }  # fmt: skip


def with_method(settings: dict[str, Any], method: str, options: Settings) -> dict[str, Any]:
    """Return shared settings with a method in them."""
    own = {name: value for name, value in options.items() if name not in SERVER}
    server = {SERVER[name]: value for name, value in options.items() if name in SERVER}
    optimizer = {"optimizer": {"name": method.lower(), "options": {"tau": TAU, **server}}} if server else {}
    return {**settings, "algorithm": {**METHODS[method], **own, **settings["algorithm"]}, **optimizer}


def below(text: str, arm: str, others: list[str], figure: str = "objective", paper: str = "lowest") -> Claim:
    """Return the claim that a figure of ``arm`` is below that of each of ``others``."""
    return Claim(text, [Lead(other, arm, figure) for other in others], paper=paper, unit=1.0, digits=4)


def training_loss(simulation: Simulation) -> entry.Measurements:
    """Return :func:`~reproduce.entry.curves`, and the loss of the kept models on as many training samples as test samples.

    Curves: ``objective``, and its exponential ``perplexity``. Figures: the same in the mean over the last tenth, and
    ``rises``, the sum of all rises of the loss in the first quarter.
    """
    federation, found = simulation.federation, entry.curves(simulation)
    dataset = open_data(federation)
    spec = federation_model(federation, dataset)
    # Training samples in the place of test samples. The datasets have no inputs beside x.
    own = replace(
        dataset, test_x=dataset.train_x, test_y=dataset.train_y, test_owners=dataset.owners, others={}
    ).limited(1, len(dataset.test_y), seed=federation.federation.seed)
    loss_of = evaluation(spec, algorithm_of(federation, OutputSide(spec, 0)), own, "cpu")
    losses = [
        (float(n), loss_of(tensors.load(path.read_bytes()))["loss"]) for n, path in simulation.kept.items()
    ]
    lines = {
        "objective": losses,
        "perplexity": [(number, math.exp(min(loss, 50.0))) for number, loss in losses],
    }
    figures = {name: tail(line) for name, line in lines.items()}
    start = losses[: max(2, len(losses) // 4)]
    figures["rises"] = sum(max(0.0, later - earlier) for (_, earlier), (_, later) in pairwise(start))
    return entry.Measurements(found.figures | figures, found.lines | lines)


STEPS, TOP, BOTTOM = (0.1, 0.05, 0.02, 0.01, 0.001), (0.9, 0.1), (0.1, 0.9)
_ADAPTIVE = {"lr": STEPS, "server_lr": (0.0316, 0.01, 0.00316), "beta1": BOTTOM, "beta2": TOP}
GRID: dict[str, dict[str, tuple[float, ...]]] = {
    "FedAvg": {"lr": STEPS},
    "SCAFFOLD": {"lr": STEPS},
    "STEM": {"lr": STEPS, "alpha": TOP},
    "FedAdam": _ADAPTIVE,
    "FedAMS": _ADAPTIVE,
    "FAFED": {"lr": (0.01, 0.001, 0.02, 0.05, 0.1), "alpha": TOP, "beta": TOP},
}
"""The paper's values of each option (fafed.md 4.4). The first ones are the centre, which the other options keep."""


def _name(method: str, level: str, option: str, value: float) -> str:
    varied = "centre" if value == GRID[method][option][0] else f"{option}={value:g}"
    return f"{method}, {level}, {varied}"


def pilot_arms(scale: Scale) -> list[Federated]:
    """Return a method with its options at the centre, and with each other value of each option. None at scale cpu."""
    found = {}
    for level, (method, options) in product(LEVELS if scale != "cpu" else (), GRID.items()):
        settings = image_settings("fashion_mnist", scale, level)
        rounds = max(2, settings["federation.rounds"] // 3)
        settings |= {"data.validation": 0.1, "federation.rounds": rounds}
        settings |= {"round.evaluate_every": max(1, rounds // 30), "simulation.keep_every": 0}
        centre = {option: values[0] for option, values in options.items()}
        for option, value in ((option, value) for option, values in options.items() for value in values):
            tried = with_method(settings, method, {**centre, option: value})
            found[_name(method, level, option, value)] = tried
    return [Federated(name, settings) for name, settings in found.items()]


PILOT = Entry(
    "fafed/pilot", "Choice of steps and momenta on validation data", pilot_arms,
    choices=[
        entry.Choice(f"{method}, {level}: {option}", {f"{x:g}": _name(method, level, option, x) for x in values})
        for level in LEVELS
        for method, options in GRID.items()
        for option, values in options.items()
    ],
    note=entry.note_of(__doc__), seeds=entry.ONCE,
)  # fmt: skip
