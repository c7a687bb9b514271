"""FAFED's Theorem 1 and what follows it: who walks away from the optimum of three clients, and who comes to it.

The algorithms are those that devices run, on double-precision numbers. Expected are the numbers of fafed.md 2.2 and 2.4,
which were computed apart from this code. ``xbar`` after t iterations is the spec's xbar_{t+1}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.algorithms.adaptive.naive_adaptive import naive_adaptive
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.analysis.charts import line_chart
from edgefl.contract.algorithm import Algorithm
from reproduce.batched_clients import rescheduled, together
from reproduce.entry import ArmRun, Claim, Computed, Entry, Measurements, Progress, Scale
from reproduce.fafed import three_clients
from reproduce.results import Judged, Results, judge_factory
from tests.support.reference import Client, federated

Path = Mapping[int, float]
"""xbar by the number of completed iterations, at every synchronisation."""

LATER: Sequence[int] = (1_000, 10_000, 20_000, 50_000)
BETAS, ETAS = (0.1, 0.5, 0.9, 0.99), (0.001, 0.01, 0.1)
SHOWN = 400
"""Points of a line in a chart."""
SWEPT = 2_000
LIMITS: Mapping[Scale, int] = {"smoke": 100, "cpu": 50_000, "paper": 50_000}
"""Most iterations of a run."""
ARM = "three clients"
LEAVES, NEARER, FALLS, OFF = "only leaves", "comes nearer", "only falls", "distance from the closed form"


@dataclass(frozen=True)
class Known:
    """A number that a run should give after ``at`` iterations, within ``within``."""

    at: int
    xbar: float
    within: float


@dataclass(frozen=True)
class Run:
    """``steps`` iterations of ``algorithm``, and what is known of them."""

    name: str
    algorithm: Callable[[], Algorithm]
    steps: int
    known: tuple[Known, ...]


def naive(q: int = 5, lr: float = 0.1, beta: float = 0.5) -> Algorithm:
    return naive_adaptive(three_clients.objective(), batch=1, steps=q, lr=lr, beta=beta)


def practical(lr: float = 0.1, alpha: float = 0.9, **options: object) -> Algorithm:
    settings: dict[str, object] = {"batch": 1, "steps": 5, "beta": 0.5, "opening_steps": 1, **options}
    return fafed(three_clients.objective(), lr=lr, alpha=alpha, **settings)  # type: ignore[arg-type]


def theory() -> Algorithm:
    """L = 6, N = 3, q = 5, b = 1, rho = 1."""
    return practical(schedule="theory", smoothness=6.0, devices=3, rho=1.0)


def fedavg(q: int, lr: float) -> Algorithm:
    return sgd(three_clients.objective(), batch=1, steps=q, lr=lr, momentum=0.0, weight_decay=0.0)


def _naive_runs() -> Iterator[Run]:
    table = (10.04714045, 10.08563047, 10.12126530, 10.15569182, 10.18955852, 10.22315536)
    every = [Known(t, x, 1e-8) for t, x in enumerate(table, start=1)]
    later = [Known(10, 10.356734, 1e-6), Known(100, 13.35675014, 1e-8), Known(1000, 43.35675014, 1e-8)]
    for q in (1, 5, 10, 20):
        known = tuple(each for each in (*every, *later) if each.at % q == 0)
        yield Run(f"naive, q={q}", lambda q=q: naive(q), 1000, known)  # type: ignore[misc]


def _fafed_runs() -> Iterator[Run]:
    first = (Known(0, 9.98263757, 1e-8), Known(5, 9.89582542, 1e-8), Known(100, 8.2463946, 1e-7))
    limits = {(0.1, 0.9): 1.0876, (0.1, 0.1): 0.5314, (0.03, 0.9): 0.3964, (0.03, 0.1): 0.1569}
    for (lr, alpha), limit in limits.items():
        steps = round(150 / lr)
        known = (*(first if (lr, alpha) == (0.1, 0.9) else ()), Known(steps, limit, 6e-5))
        name = f"FAFED, eta={lr}, alpha={alpha}"
        yield Run(name, lambda lr=lr, alpha=alpha: practical(lr, alpha), steps, known)  # type: ignore[misc]
    decaying = (Known(10_000, 0.0212, 6e-5),)
    yield Run(
        "FAFED, decaying, alpha=0.1",
        lambda: practical(0.1, 0.1, schedule="decaying"),
        10_000,
        decaying,
    )
    values = (9.61619, 6.16532, 2.33103)
    known = (
        *(Known(t, x, 6e-6) for t, x in zip(LATER, values, strict=False)),
        Known(50_000, 2.1e-20, 1e-21),
    )
    yield Run("FAFED, theory", theory, 50_000, known)


def _fedavg_runs() -> Iterator[Run]:
    yield Run("FedAvg, q=5, eta=0.01", lambda: fedavg(5, 0.01), 20_000, (Known(20_000, 0.0, 1e-30),))
    yield Run("FedAvg, q=5, eta=0.1", lambda: fedavg(5, 0.1), 2_000, (Known(2_000, 2.05, 6e-3),))
    yield Run("FedAvg, q=20, eta=0.1", lambda: fedavg(20, 0.1), 2_000, (Known(2_000, 8.00, 6e-3),))


def _runs() -> tuple[Run, ...]:
    return (*_naive_runs(), *_fafed_runs(), *_fedavg_runs())


def path(algorithm: Algorithm, steps: int, x: float = 10.0, **hyper: float) -> Path:
    """xbar at every synchronisation of ``steps`` iterations that begin with ``x`` on all three clients."""
    return walked(together(algorithm, len(three_clients.SLOPES)), steps, x, **hyper)


def walked(algorithm: Algorithm, steps: int, x: float = 10.0, **hyper: float) -> Path:
    """:func:`path` of an algorithm that is already one for all three clients."""
    each = three_clients.clients()
    all_in_one = Client(0, torch.stack([one.x for one in each]), torch.stack([one.y for one in each]))
    q, opening = algorithm.phases[0].steps, len(algorithm.opening)
    rounds = federated(
        algorithm,
        three_clients.weights(x),
        [all_in_one],
        rounds=steps // q + opening,
        feed=three_clients.feed,
        hyper=hyper,
    )
    return {(done.number - opening) * q: float(done.weights[three_clients.NAME]) for done in rounds}


def drift(beta: float, eta: float, steps: int) -> float:
    """Algorithm 1 in closed form, away from |x| <= 1: eta/3 times the sum of (1 - beta^k)^(-1/2) over k = 1 .. steps."""
    return eta / 3 * sum(1 / math.sqrt(1 - beta**k) for k in range(1, steps + 1))


def run(work: ArmRun) -> Measurements:
    """Every run, each at most :data:`LIMITS` iterations long."""
    limit = LIMITS[work.scale]
    figures: dict[str, float] = {}
    paths: dict[str, Path] = {}
    recorded: dict[tuple[str, int], Algorithm] = {}
    for each in _runs():
        steps = min(each.steps, limit)
        work.progress(f"{each.name}, {steps:,} iterations")
        algorithm = each.algorithm()
        # All schedules of a method share the graphs of one round.
        kind = (algorithm.name, algorithm.phases[0].steps)
        if kind not in recorded:
            recorded[kind] = together(algorithm, len(three_clients.SLOPES))
        means = paths[each.name] = walked(rescheduled(recorded[kind], algorithm), steps)
        figures |= {
            f"{each.name}: {_at(known)}": means[known.at] for known in each.known if known.at <= steps
        }
        figures |= _direction(each.name, means)
    figures |= _sweep(recorded["naive_adaptive", 5], min(SWEPT, limit), work.progress)
    return Measurements(figures, pictures=_charts(paths))


def _at(known: Known) -> str:
    return f"xbar, t={known.at:,}"


def _direction(name: str, found: Path) -> dict[str, float]:
    """The theorem itself: the naive method only ever leaves, all others end nearer to 0 than they began. The last value,
    and 1 where it is so."""
    values = list(found.values())
    if name.startswith("naive"):
        leaves = values[0] > 10 and all(b > a for a, b in pairwise(values))
        return {f"{name}: {LEAVES}": float(leaves)}
    figures = {f"{name}: {NEARER}": float(abs(values[-1]) < 10)}
    if name == "FAFED, theory":
        figures[f"{name}: {FALLS}"] = float(all(later < earlier for earlier, later in pairwise(values)))
    return figures


def _sweep(made: Algorithm, steps: int, progress: Progress) -> dict[str, float]:
    """Algorithm 1 for every step size and decay of the spec's table: how far it is from its closed form."""
    progress(f"naive adaptive, 12 pairs of beta and eta, {steps:,} iterations each")
    whole = steps // 5 * 5
    return {
        f"naive, beta={beta}, eta={eta}: {OFF}": abs(
            walked(made, steps, lr=eta, beta=beta)[whole] - 10 - drift(beta, eta, whole)
        )
        for beta in BETAS
        for eta in ETAS
    }


def _numbers(results: Results) -> Judged:
    """Every known number that a run reached."""
    (figures,) = results.figures[ARM]
    known = {f"{each.name}: {_at(one)}": one for each in _runs() for one in each.known}
    reached = [name for name in known if name in figures]
    wrong = [name for name in reached if abs(figures[name] - known[name].xbar) > known[name].within]
    return Judged(not wrong, "; ".join(wrong) if wrong else f"all {len(reached)} agree")


@judge_factory
def _every(results: Results, quantity: str, fits: Callable[[float], bool]) -> Judged:
    """All figures of ``quantity``."""
    (figures,) = results.figures[ARM]
    own = {name: value for name, value in figures.items() if name.endswith(f": {quantity}")}
    wrong = [name for name, value in own.items() if not fits(value)]
    return Judged(bool(own) and not wrong, "; ".join(wrong) if wrong else f"all {len(own)} runs")


def _published() -> dict[str, float]:
    return {f"{each.name}: {_at(known)}": known.xbar for each in _runs() for known in each.known}


def _charts(paths: Mapping[str, Path]) -> dict[str, str]:
    close = {
        name: _thinned({t: x for t, x in means.items() if t <= 2_000})
        for name, means in paths.items()
        if "q=1" not in name and "0.03" not in name
    }
    far = {
        name: _thinned({t: abs(x) for t, x in means.items()})
        for name, means in paths.items()
        if name.startswith("FAFED") or "0.01" in name or name == "naive, q=5"
    }
    return {
        "first-iterations.svg": line_chart(
            close, title="Three clients: away from the optimum 0, or towards it", x="iteration", y="mean x"
        ),
        "convergence.svg": line_chart(
            far, title="Three clients: distance from the optimum", x="iteration", y="|mean x|", log_y=True
        ),
    }


def _thinned(found: Path) -> list[tuple[float, float]]:
    points = [(float(t), x) for t, x in found.items()]
    return points[:: max(1, len(points) // SHOWN)]


_NOTE = (
    "Deterministic: no seed, every batch is all that a client has. Start x = 10 on all clients; beta = 0.5, q = 5 and "
    "rho = 0.01 where the name says nothing else; decaying: eta = 0.1 / (1 + t)^(1/3); theory: L = 6, N = 3, b = 1, "
    "rho = 1. 'only': at every synchronisation. t: completed iterations."
)

ENTRY = Entry(
    name="fafed/counterexample",
    what="FAFED, Theorem 1: adaptive steps on each client alone diverge on three clients, FAFED converges",
    arms=lambda _: (Computed(ARM, run),),
    columns=(),
    published={ARM: _published()},
    claims=(
        Claim(
            "Theorem 1",
            "adaptive steps on each client alone only ever leave the optimum",
            "for every eta, beta, q",
            _every(LEAVES, bool),
            exact=True,
        ),
        Claim(
            "Theorem 1",
            "how far they leave is the closed form's, for 12 pairs of beta and eta, to 1e-8",
            "",
            _every(OFF, lambda off: off <= 1e-8),
            exact=True,
        ),
        Claim("2.2, 2.4", "the specification's numbers", "", _numbers, exact=True),
        Claim("2.4", "FAFED and FedAvg end nearer to the optimum", "", _every(NEARER, bool), exact=True),
        Claim("2.4", "FAFED with the theory's steps only falls", "", _every(FALLS, bool), exact=True),
    ),
    note=_NOTE,
    seeds={"smoke": 1, "cpu": 1, "paper": 1},
)
