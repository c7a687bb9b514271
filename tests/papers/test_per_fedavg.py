"""Per-FedAvg's table: its rows can be spread over users at every scale, and its claims read the rows that were run."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.api.federation import load_federation
from edgefl.data.groups import groups
from reproduce.entry import SCALES, Federated, Scale
from reproduce.per_fedavg.judges import ahead, change
from reproduce.per_fedavg.personal import AFTER
from reproduce.per_fedavg.rows import FEDAVG, HF
from reproduce.per_fedavg.table1 import ENTRY, LARGER, MNIST_4, MNIST_10, MNIST_ROWS, SINGLE
from reproduce.results import Results, larger_lead

CLASSES = 10
SAMPLES = {"mnist": (5421, 892), "cifar10_jpeg": (5000, 1000)}
"""Training and test samples of the rarest class."""


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_has_the_samples_that_its_users_are_given(scale: Scale) -> None:
    for arm in ENTRY.arms(scale):
        assert isinstance(arm, Federated)
        federation = load_federation(None, arm.settings)
        data, users = federation.data, federation.tiers["user"].count
        train, test = SAMPLES[data.name]
        for a, most, used in (
            (data.group_samples, train, data.train_samples),
            (data.group_test_samples, test, data.test_samples),
        ):
            labels = np.tile(np.arange(CLASSES), most)[: used or None]
            parts = groups(labels, users, a=a, single_class=data.single_class, seed=0)
            assert len(parts) == users and len(parts[0]) == 5 * a


def results(**after: float) -> Results:
    """Of one seed, accuracy after a step by arm."""
    arms = {"mnist": MNIST_4, "main": LARGER, "single": SINGLE}
    names = {f"{key}_{each}": row.arm(each) for key, row in arms.items() for each in (FEDAVG, HF)}
    return Results(
        [0],
        {names[key]: [{AFTER: value}] for key, value in after.items()},
        {names[key]: [{}] for key in after},
    )


def test_a_method_is_ahead_in_the_rows_that_were_run() -> None:
    found = results(mnist_FedAvg=0.5, mnist_HF=0.6)

    judged = ahead(HF, FEDAVG, MNIST_ROWS)(found)

    assert judged.held and judged.ours == f"{MNIST_4.name}: +10.00"
    assert not ahead(FEDAVG, HF, MNIST_ROWS)(found).held
    assert not ahead(HF, FEDAVG, (MNIST_10,))(found).held


def test_leads_and_changes_are_compared_between_rows() -> None:
    found = results(main_FedAvg=0.4, main_HF=0.5, single_FedAvg=0.5, single_HF=0.7)

    single, larger = ((row.arm(HF), row.arm(FEDAVG)) for row in (SINGLE, LARGER))
    assert larger_lead(single, larger, AFTER)(found).ours == "+20.00 against +10.00"
    assert larger_lead(single, larger, AFTER)(found).held
    assert not larger_lead(larger, single, AFTER)(found).held
    assert change(HF, LARGER, SINGLE, AFTER, least=0, most=1)(found).held
    assert not change(HF, LARGER, SINGLE, AFTER, least=-1, most=0)(found).held
