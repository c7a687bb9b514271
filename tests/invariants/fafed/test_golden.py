"""FAFED's golden vector: two clients in two dimensions with exact gradients (fafed.md, section 7)."""

from __future__ import annotations

import torch

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.contract.tensors import Tensors
from tests.invariants.fafed.tiny import (
    GOLDEN,
    Trace,
    X,
    at,
    close,
    traced,
    with_old_preconditioner,
    with_own_v,
    with_start,
)

OPTIONS = {"batch": 1, "steps": 2, "lr": 0.1, "alpha": 0.1, "beta": 0.9, "rho": 0.01}


def trace(**options: object) -> Trace:
    algorithm = fafed(GOLDEN.objective, **{**OPTIONS, **options})
    return traced(algorithm, at(0.5, 0.5), GOLDEN.clients, rounds=3)


def test_golden_opening() -> None:
    opening = trace().rounds[0]
    assert close(opening.server_state[f"m/{X}"], (3.5, 2.25))
    assert close(opening.server_state[f"v/{X}"], (28.25, 19.125))
    assert close(opening.weights[X], (0.4342732004, 0.4486678031))


def test_golden_first_iteration() -> None:
    one, two = trace().steps[0]
    assert close(one.A, (5.3250729064, 4.3832139211)) and close(two.A, (5.3250729064, 4.3832139211))
    assert close(one.x, (0.4342732004, 0.4486678031)) and torch.equal(one.x, two.x)
    assert close(one.m, (3.0342732004, 2.4196712124))
    assert close(two.m, (3.7028196011, 1.8236678031))
    assert close(one.v, (25.4570046812, 20.5703214460))
    assert close(two.v, (30.7581174126, 17.4531631585))


def test_golden_first_synchronisation() -> None:
    found = trace()
    one, two = found.x(2)
    assert close(one, (0.3772923242, 0.3934646746))
    assert close(two, (0.3647376341, 0.4070620810))
    assert close(found.rounds[1].server_state[f"m/{X}"], (3.2357526132, 1.9904603898))
    assert close(found.rounds[1].server_state[f"v/{X}"], (27.8325860197, 18.7908356723))
    assert close(found.rounds[1].weights[X], (0.3097974064, 0.3544513225))
    assert close(found.steps[2][0].A, (5.2856597710, 4.3448397516))


def test_golden_second_round() -> None:
    found = trace()
    assert close(found.steps[2][0].m, (2.7824116665, 2.1927468122))
    assert close(found.steps[2][1].m, (3.4567779591, 1.5795098004))
    assert close(found.x(4)[0], (0.2571566428, 0.3039834816))
    assert close(found.x(4)[1], (0.2443982300, 0.3180976273))
    assert close(found.rounds[2].server_state[f"m/{X}"], (2.9951756664, 1.7670157769))
    assert close(found.rounds[2].weights[X], (0.1932682476, 0.2696782698))
    A_4 = found.rounds[2].server_state[f"v/{X}"].sqrt() + 0.01
    assert close(A_4, (5.2081688653, 4.2720458723))


def test_golden_first_step_without_preconditioner() -> None:
    found = trace(first_step="plain")
    assert close(found.rounds[0].weights[X], (0.15, 0.275))
    assert close(found.rounds[1].weights[X], (0.0454871412, 0.1992904099))


def test_golden_names_the_variant_that_averages_the_previous_points() -> None:
    """After a synchronisation x_{t-1} must be a client's own point; with the average m_3 is what the spec calls wrong."""
    algorithm = fafed(GOLDEN.objective, **OPTIONS)
    sent = trace().rounds[1].carries
    average = torch.stack([carry[f"previous.{X}"] for carry in sent.values()]).mean(0)

    def averaged(given: Tensors) -> Tensors:
        second = not torch.equal(given[f"carry.previous.{X}"], torch.full((2,), 0.5, dtype=torch.float64))
        return algorithm.start.fn(given | ({f"carry.previous.{X}": average} if second else {}))

    wrong = traced(with_start(algorithm, averaged), at(0.5, 0.5), GOLDEN.clients, rounds=3)
    assert close(wrong.steps[2][0].m, (2.7880612771, 2.1682714807))
    assert close(wrong.steps[2][1].m, (3.4398291275, 1.5856286333))


X_2, X_3 = ((0.3772923242, 0.3934646746), (0.3647376341, 0.4070620810)), (0.3097974064, 0.3544513225)


def test_golden_is_missed_by_a_private_preconditioner_and_by_an_old_one() -> None:
    made = fafed(GOLDEN.objective, **OPTIONS)
    private, old = (
        traced(wrong, at(0.5, 0.5), GOLDEN.clients, rounds=3)
        for wrong in (with_own_v(made, private=True), with_old_preconditioner(made))
    )
    assert all(close(found, wanted) for found, wanted in zip(old.x(2), X_2, strict=True))
    assert not any(close(found, wanted, 1e-3) for found, wanted in zip(private.x(2), X_2, strict=True))
    assert not any(close(wrong.rounds[1].weights[X], X_3, 1e-4) for wrong in (private, old))
    kept = traced(with_own_v(made), at(0.5, 0.5), GOLDEN.clients, rounds=3)
    assert close(kept.rounds[1].weights[X], X_3), "a v of one's own alone changes nothing"
