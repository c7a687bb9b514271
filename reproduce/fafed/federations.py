"""Federations of FAFED's experiments: the settings that all methods share, and the options of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reproduce.entry import Claim, Scale, lead
from reproduce.fafed.models import CIFAR_CNN, FASHION_CNN, MNIST_CNN

Options = Mapping[str, Any]
SGD = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}
METHODS: Mapping[str, Options] = {
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

LEVELS: Mapping[str, tuple[str, int, int, int]] = {
    "low": ("similarity", 5, 20, 20),
    "medium": ("dirichlet_equal", 50, 10, 10),
    "high": ("paired", 100, 5, 4),
}
"""Partition, b and q by level of heterogeneity, and the clients that the simulator trains at a time."""
IMAGES = {
    "fashion_mnist": (FASHION_CNN, 3_000),
    "mnist": (MNIST_CNN, 3_000),
    "cifar10_jpeg": (CIFAR_CNN, 2_500),
}
"""Model, and training samples of a client."""
SIZES: Mapping[Scale, tuple[int, int]] = {"smoke": (2, 1), "cpu": (10, 10), "paper": (20, 30)}
"""Clients and epochs."""

CHOSEN: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    "FedAvg": {"lr": (0.1, 0.1, 0.1)},
    "SCAFFOLD": {"lr": (0.1, 0.1, 0.1)},
    "STEM": {"lr": (0.1, 0.1, 0.1), "alpha": (0.9, 0.9, 0.9)},
    "FedAdam": {"lr": (0.1, 0.1, 0.1), "server_lr": (0.0316, 0.0316, 0.0316),
                "beta1": (0.1, 0.1, 0.1), "beta2": (0.9, 0.9, 0.9)},
    "FedAMS": {"lr": (0.1, 0.1, 0.1), "server_lr": (0.0316, 0.0316, 0.0316),
               "beta1": (0.1, 0.1, 0.1), "beta2": (0.9, 0.9, 0.9)},
    "FAFED": {"lr": (0.01, 0.01, 0.01), "alpha": (0.9, 0.9, 0.9), "beta": (0.9, 0.9, 0.9)},
}  # fmt: skip
"""Options of each method at low, medium and high heterogeneity: what ``fafed/pilot`` chooses."""


def shared_settings(clients: int, rounds: int, **data: Any) -> dict[str, Any]:
    """Return the settings that all methods have: all clients in every round, and some 90 models kept for the loss."""
    keep = max(1, rounds // 90)
    return {f"data.{name}": value for name, value in data.items()} | {
        "federation.rounds": rounds, "round.evaluate_every": 2 * keep, "simulation.keep_every": keep,
        "tiers": {"strong": {"count": clients, "devices": ["strong-*"]}},
    }  # fmt: skip


def image_settings(data: str, scale: Scale, level: str) -> dict[str, Any]:
    """Return the settings that all methods share on images."""
    (model, samples), (partition, batch, steps, at_a_time), (clients, epochs) = (
        IMAGES[data],
        LEVELS[level],
        SIZES[scale],
    )
    rounds, train, test = epochs * samples // (batch * steps), clients * samples, 0
    if scale == "smoke":
        rounds, batch, steps, train, test = 4, 4, 2, 200, 100
    return {
        **shared_settings(clients, rounds, name=data, partition=partition, train_samples=train, test_samples=test),
        "algorithm": {"batch": batch, "steps": steps},
        "model.name": model, "model.options": {"initial": "torch"},
        "simulation.together": min(at_a_time, clients),
    }  # fmt: skip


def with_method(settings: Mapping[str, Any], method: str, options: Options) -> dict[str, Any]:
    """Return shared settings with a method in them."""
    own = {name: value for name, value in options.items() if name not in SERVER}
    server = {SERVER[name]: value for name, value in options.items() if name in SERVER}
    optimizer = {"optimizer": {"name": method.lower(), "options": {"tau": TAU, **server}}} if server else {}
    return {**settings, "algorithm": {**METHODS[method], **own, **settings["algorithm"]}, **optimizer}


def below(
    text: str, arm: str, others: Sequence[str], figure: str = "objective", paper: str = "lowest"
) -> Claim:
    """Return the claim that a figure of ``arm`` is below that of each of ``others``."""
    return Claim(text, [lead(other, arm, figure) for other in others], paper=paper, unit=1.0, digits=4)
