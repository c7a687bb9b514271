"""What FedBAT's learned step sizes and its warm-up are worth (FedBAT, Tables 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproduce.entry import Arm, Chart, Claim, Entry, Federated, Scale, percent
from reproduce.fedbat.federations import FEDBAT, LABELS, SETUPS, close, measured
from reproduce.fedbat.main import NOTE_CPU
from reproduce.results import above, not_below

RHOS: Mapping[float, float] = {0: 87.9, 2: 88.2, 4: 88.9, 8: 88.7, 10: 88.9}
PHIS: Mapping[float, float] = {0.1: 88.6, 0.3: 88.7, 0.7: 89.0, 0.9: 88.5}
"""Tables 2 and 3, Fashion-MNIST; 89.0 with rho = 6 and phi = 0.5."""
DEFAULT = f"{FEDBAT}, rho=6, phi=0.5"
AFTER = "phi=1 (binarized after training)"


def arms(scale: Scale) -> Sequence[Arm]:
    """The default, each rho and each phi; the two that the claims need, where it is not scale ``paper``."""
    setup, whole = SETUPS[scale], scale == "paper"
    options: dict[str, Mapping[str, float]] = {
        DEFAULT: {},
        **{_rho(rho): {"rho": rho} for rho in RHOS if whole or rho == 0},
        **{_phi(phi): {"phi": phi} for phi in PHIS if whole or phi == 0.1},
        AFTER: {"phi": 1.0},
    }
    return tuple(
        Federated(name, setup.settings(FEDBAT, LABELS, each), measured) for name, each in options.items()
    )


def _rho(rho: float) -> str:
    return f"rho={rho:g}"


def _phi(phi: float) -> str:
    return f"phi={phi:g}"


ENTRY = Entry(
    name="fedbat/ablation",
    what="FedBAT, Tables 2 and 3: learned step sizes (rho) and the share of warm-up steps (phi)",
    arms=arms,
    columns=(percent("accuracy", "accuracy, %"), percent("best", "best, %")),
    published={
        DEFAULT: {"accuracy": 0.890},
        **{_rho(rho): {"accuracy": value / 100} for rho, value in RHOS.items()},
        **{_phi(phi): {"accuracy": value / 100} for phi, value in PHIS.items()},
    },
    claims=(
        Claim(
            "H4",
            "to learn the step sizes (rho = 6) is better than to keep them (rho = 0)",
            "+1.1",
            above(DEFAULT, _rho(0), "accuracy"),
            doubt="0.4 points are noise in the paper itself (fedbat.md 8.13), and few local steps are left to learn them",
        ),
        Claim(
            "H5",
            "to binarize in training, with step sizes that stay (rho = 0), is better than after it (phi = 1)",
            "a control that the paper has not; rho = 0 is +0.5 on EF-SignSGD",
            above(_rho(0), AFTER, "accuracy"),
            doubt="marginal at full scale (fedbat.md 9)",
        ),
        Claim(
            "H5",
            "FedBAT is better than binarizing after training (phi = 1)",
            "a control that the paper has not",
            above(DEFAULT, AFTER, "accuracy"),
        ),
        Claim(
            "H6",
            "phi = 0.5 and phi = 0.1 are at most 1 point apart",
            "0.4",
            close(DEFAULT, _phi(0.1), 0.01),
            doubt="a tenth of 80 steps is too short for mean|m| to say how far the update will go",
        ),
        Claim(
            "H6",
            "phi = 0.5 is not below phi = 0.1",
            "+0.4",
            not_below(DEFAULT, _phi(0.1), "accuracy", slack=0.0),
        ),
    ),
    charts=(Chart("accuracy.svg", "Fashion-MNIST, Non-IID-2: accuracy by round", "accuracy", y="accuracy"),),
    note=(
        NOTE_CPU
        + " Non-IID-2, as in fedbat/main. rho = 0: every step size stays mean|m| of the warm-up; phi = 1: FedAvg's "
        "training, then S with alpha = mean|m|, which is no arm of the paper (fedbat.md 3)."
    ),
)
