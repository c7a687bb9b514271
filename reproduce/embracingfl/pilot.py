"""Choice of learning rates on validation data.

Accuracy on a tenth of the training samples, which no client has; seed 100, which no table uses. All strong clients (case
1), and case 7 (12.5 % strong, 87.5 % weak) of both methods. A rate of 0.05 was tried as well and was worse than 0.1 for each
of the three: 49.7, 45.5 and 35.3 %. The strong clients alone take the rate of all strong. At scale paper all rates are the
paper's 0.4.
"""

from __future__ import annotations

from reproduce.embracingfl.federations import ALL_STRONG, CASES, EMBRACING, WIDTH, images
from reproduce.entry import JPEG, Arm, Choice, Entry, Federated, Scale, note_of

RATES = (0.1, 0.2, 0.4)
CANDIDATES = {ALL_STRONG: (1, EMBRACING), EMBRACING: (7, EMBRACING), WIDTH: (7, WIDTH)}
"""Case and submodels by the method whose rate is chosen."""


def arms(scale: Scale) -> list[Arm]:
    """Return an arm for each method and rate."""
    tried = (
        (name, lr, images(scale, CASES[case], method, lr=lr))
        for name, (case, method) in CANDIDATES.items()
        for lr in RATES
    )
    return [
        Federated(f"{name}, {lr:g}", {**settings, "data.validation": 0.1}) for name, lr, settings in tried
    ]


ENTRY = Entry(
    "embracingfl/pilot", "Pilot: learning rates", arms,
    choices=[Choice(name, {f"{lr:g}": f"{name}, {lr:g}" for lr in RATES}) for name in CANDIDATES],
    note=note_of(__doc__), other_data=JPEG, seeds={"smoke": 1, "cpu": 1, "paper": 1},
)  # fmt: skip
