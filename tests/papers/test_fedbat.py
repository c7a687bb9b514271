"""FedBAT's entries: judges, counts and bounds say what they should."""

from __future__ import annotations

import pytest
import torch

from reproduce.fedbat import main, one_bit, theory
from reproduce.fedbat.federations import DIRICHLET, IID, LABELS, ahead_at_equal_bytes, close, sooner
from reproduce.results import Results


def _results(**accuracy: float) -> Results:
    return Results(
        [0, 1],
        {arm: [{"accuracy": value}, {"accuracy": value + 0.01}] for arm, value in accuracy.items()},
        {
            arm: [{"accuracy": [(1.0, value / 2), (2.0, value)], "sent": [(1.0, value / 2), (2.0, value)]}]
            * 2
            for arm, value in accuracy.items()
        },
    )


def test_at_scale_paper_every_method_is_run_under_every_partition() -> None:
    names = {arm.name for arm in main.arms("paper")}
    assert names == {main.name(method, each) for method in main.METHODS for each in (IID, DIRICHLET, LABELS)}


def test_accuracies_that_are_close() -> None:
    found = _results(a=0.8, b=0.7, c=0.79)
    assert close("a", "c", 0.011)(found).held and not close("a", "b", 0.011)(found).held


def test_rounds_to_a_share_of_another_arms_accuracy() -> None:
    found = _results(a=0.8, b=0.7, c=0.2)
    assert sooner("a", ("b", "c"), "a", 0.5)(found).held
    assert sooner("a", ("b", "c"), "a", 0.9)(found).ours == "a 2.0, b 3.0, c 3.0"
    assert not sooner("b", ("a",), "a", 0.9)(found).held
    assert sooner("b", ("a",), "a", 0.9, slack=0.5)(found).held


def test_at_equal_bytes_the_first_round_may_count() -> None:
    lines = {"small": [{"sent": [(0.1, 0.3), (0.2, 0.6)]}], "large": [{"sent": [(1.0, 0.5), (2.0, 0.9)]}]}
    found = Results([0], {}, lines)
    assert ahead_at_equal_bytes("small", "large")(found).ours == "+10.00; large after round 1"
    assert ahead_at_equal_bytes("large", "small")(found).held


@pytest.mark.slow
def test_the_counts_are_the_specifications() -> None:
    figures = one_bit.count(None).figures  # type: ignore[arg-type]
    assert figures["CNN, 1x28x28: bytes"] == 48_918
    assert figures["CNN, 1x28x28, FedBAT: bits a parameter"] == pytest.approx(1.0012, abs=1e-4)


def _bound(q2: float, sampled: int) -> float:
    return theory.bound(100, apart=0.5, q2=q2, g2=3.0, sampled=sampled, start=2.0)


def test_bounds_agree_where_the_theory_says_so() -> None:
    assert _bound(2.0, 2) > _bound(2.0, 8) > _bound(0.0, 8)
    # By hand: mu = 1, L = 4, gamma = 31, B = 2.5 / 8 + 12 + 8 * 16 * 3 with q = 0 and all clients.
    assert _bound(0.0, 8) == pytest.approx(4 / 131 * (2 * (0.3125 + 12 + 384) + 16 * 2))


def test_without_noise_in_what_is_sent_the_quadratic_is_solved() -> None:
    generator = torch.Generator().manual_seed(0)
    task = theory.SampledQuadratic(torch.randn(8, 10, generator=generator, dtype=torch.float64))
    exact = theory.descend(task, 100, generator, binarized=False)
    coarse = theory.descend(task, 100, generator, binarized=True)
    assert exact.t[-1] == 500 and exact.gaps[-1] < 0.01 * exact.gaps[0]
    assert exact.gaps[-1] < coarse.gaps[-1] < coarse.gaps[0]


def test_a_slope_is_that_of_the_logarithms() -> None:
    times = list(range(0, 5_000, 5))
    assert theory.slope(times, [1.0, *(7 / t for t in times[1:])]) == pytest.approx(-1)
