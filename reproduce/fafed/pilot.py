"""Pilot of Table 2: the paper's grid, one option of a method at a time, on a validation split of Fashion-MNIST.

The paper's grid for each method and level of Table 2. In full it has 480 runs. Here one option is varied at a time, with the
others at the centre. Runs are Table 2's, with 10 epochs instead of 30 and a tenth of the training samples for validation.
The accuracy on these decides, in the mean over the last tenth of the rounds. Run it with `--seeds 100`, which no table uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproduce.entry import Choice, Entry, Federated, Scale, note_of
from reproduce.fafed.federations import LEVELS, image_settings, with_method

STEPS, TOP, BOTTOM = (0.1, 0.05, 0.02, 0.01, 0.001), (0.9, 0.1), (0.1, 0.9)
_SERVER = {"lr": STEPS, "server_lr": (0.0316, 0.01, 0.00316), "beta1": BOTTOM, "beta2": TOP}
GRID: Mapping[str, Mapping[str, Sequence[float]]] = {
    "FedAvg": {"lr": STEPS},
    "SCAFFOLD": {"lr": STEPS},
    "STEM": {"lr": STEPS, "alpha": TOP},
    "FedAdam": _SERVER,
    "FedAMS": _SERVER,
    "FAFED": {"lr": (0.01, 0.001, 0.02, 0.05, 0.1), "alpha": TOP, "beta": TOP},
}
"""The paper's values of each option (fafed.md 4.4). The first ones are the centre, which the other options keep."""


def _name(method: str, level: str, option: str, value: float) -> str:
    varied = "centre" if value == GRID[method][option][0] else f"{option}={value:g}"
    return f"{method}, {level}, {varied}"


def arms(scale: Scale) -> Sequence[Federated]:
    """Return a method with its options at the centre, and with each other value of each option. None at scale cpu."""
    found = {}
    for level in LEVELS if scale != "cpu" else ():
        settings = image_settings("fashion_mnist", scale, level)
        rounds = max(2, settings["federation.rounds"] // 3)
        settings |= {"data.validation": 0.1, "federation.rounds": rounds}
        settings |= {"round.evaluate_every": max(1, rounds // 30), "simulation.keep_every": 0}
        for method, options in GRID.items():
            centre = {option: values[0] for option, values in options.items()}
            for option, values in options.items():
                for value in values:
                    tried = with_method(settings, method, {**centre, option: value})
                    found[_name(method, level, option, value)] = tried
    return [Federated(name, settings) for name, settings in found.items()]


ENTRY = Entry(
    name="fafed/pilot",
    title="Choice of steps and momenta on validation data",
    arms=arms,
    choices=[
        Choice(f"{method}, {level}: {option}", {f"{x:g}": _name(method, level, option, x) for x in values})
        for level in LEVELS
        for method, options in GRID.items()
        for option, values in options.items()
    ],
    note=note_of(__doc__),
    seeds={"smoke": 1, "cpu": 1, "paper": 1},
)
