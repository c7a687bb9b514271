"""FAFED with one number as second moment of the whole model (fafed.md 2.3, the optional ones), beside a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.errors import ConfigError
from tests.invariants.fafed.tiny import Bowls, Trace, X, close, traced

PROBLEM = Bowls.drawn(clients=3, d=4, seed=7)
START = {X: torch.linspace(-1, 2, 4, dtype=torch.float64)}
Q, LR, ALPHA, BETA, RHO = 3, 0.05, 0.3, 0.6, 0.02
Made = Callable[[Tensor], Tensor]
Kept = Callable[[Tensor, Tensor], Tensor]


def fading(v: Tensor, new: Tensor) -> Tensor:
    return BETA * v + (1 - BETA) * new


def norm(g: Tensor) -> Tensor:
    return (g * g).sum()


KINDS: dict[str, tuple[Made, Kept]] = {
    "elementwise": (lambda g: g * g, fading),
    "scalar": (norm, fading),
    "scalar_mean": (lambda g: norm(g) / 4, fading),
    "adagrad_norm": (norm, lambda v, new: v + new),
}


@cache
def found(kind: str, rounds: int = 6, **options: Any) -> Trace:
    made = fafed(
        PROBLEM.objective,
        batch=1,
        steps=Q,
        lr=LR,
        alpha=ALPHA,
        beta=BETA,
        rho=RHO,
        second_moment=kind,
        **options,
    )
    return traced(made, START, PROBLEM.clients, rounds=rounds)


def looped(made: Made, kept: Kept, rounds: int) -> list[tuple[Tensor, Tensor]]:
    """(xbar, vbar) after each exchange, of the loop of 2.3 written out; v is a number, or a vector."""
    n = len(PROBLEM.a)
    grads = [PROBLEM.gradient(i, START[X]) for i in range(n)]
    m, v = sum(grads) / n, sum(made(g) for g in grads) / n
    A = v.sqrt() + RHO
    before, x = [START[X]] * n, [START[X] - LR * m / A] * n
    after = [(x[0], v)]
    for _ in range(rounds - 1):
        ms, vs = [m] * n, [v] * n
        for k in range(Q):
            for i in range(n):
                new = PROBLEM.gradient(i, x[i])
                ms[i] = new + (1 - ALPHA) * (ms[i] - PROBLEM.gradient(i, before[i]))
                vs[i] = kept(vs[i], made(new))
            before = x
            if k < Q - 1:
                x = [x[i] - LR * ms[i] / A for i in range(n)]
        m, v = sum(ms) / n, sum(vs) / n
        A = v.sqrt() + RHO
        x = [sum(x) / n - LR * m / A] * n
        after.append((x[0], v))
    return after


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_each_second_moment_is_that_of_a_plain_loop(kind: str) -> None:
    for done, (x, v) in zip(found(kind).rounds, looped(*KINDS[kind], 6), strict=True):
        assert close(done.weights[X], x, 1e-12)
        assert close(done.server_state[f"v/{X}"], v.expand(4), 1e-11)


def test_they_lead_elsewhere() -> None:
    last = [found(kind).rounds[-1].weights[X] for kind in KINDS]
    pairs = [(a, b) for i, a in enumerate(last) for b in last[:i]]
    assert all(not close(a, b, 1e-3) for a, b in pairs)


@pytest.mark.parametrize("kind", ["scalar", "scalar_mean", "adagrad_norm"])
def test_of_the_three_a_step_has_the_direction_of_the_momentum(kind: str) -> None:
    """One number in front of it; elementwise it points elsewhere."""

    def turned(trace: Trace) -> float:
        each = trace.steps[0][0]
        step = each.after - each.x
        return 1 + float(torch.dot(step, each.m) / (step.norm() * each.m.norm()))

    assert turned(found(kind)) < 1e-12
    assert turned(found("elementwise")) > 1e-3


def test_adagrad_norm_never_takes_from_v() -> None:
    def norms(kind: str) -> list[float]:
        return [float(done.server_state[f"v/{X}"][0]) for done in found(kind, rounds=10).rounds]

    grown, faded = norms("adagrad_norm"), norms("scalar")
    assert grown == sorted(grown) and grown[0] < grown[-1]
    assert faded != sorted(faded)


def test_a_clipped_gradient_is_what_enters() -> None:
    first = found("scalar", rounds=1, clip=0.5).rounds[0].server_state[f"v/{X}"]
    assert close(first, torch.full((4,), 0.25, dtype=torch.float64), 1e-12), "all three are longer than that"


def test_another_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"second_moment is 'global'.*elementwise, scalar, scalar_mean, adagrad_norm"
    ):
        found("global")
