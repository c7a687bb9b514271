"""What a report says of all users together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edgefl.analysis.personal.evaluate import EvaluationSetting, User, evaluate_users
from edgefl.analysis.personal.report import (
    PersonalReport,
    UserReport,
    summary,
    summed_up,
    user_rows,
    worst_decile,
)
from edgefl.data.groups import groups
from edgefl.errors import ConfigError, DataError
from edgefl_device.data.support import UserShards
from edgefl_device.personal.personalize import AdaptationPoint
from tests.analysis.personal.users import BATCH, users_of, whole


def point(steps: int, loss: float, value: float, metric: str = "accuracy") -> AdaptationPoint:
    return AdaptationPoint(steps=steps, loss=loss, metrics={metric: value})


def test_perplexity_is_less_is_better() -> None:
    plain = _report([0.2, 0.8], [30, 10])
    users = [
        replace(user, curve=(point(0, 5.0, 148.4, "perplexity"), point(1, 4.0, after, "perplexity")))
        for user, after in zip(plain.users, (20.0, 54.6), strict=True)
    ]

    report = summed_up(EvaluationSetting(0.1, (0, 1)), users)

    assert (report.metric, report.worst_decile, report.majority) == ("perplexity", 54.6, None)
    assert [row["after"] for row in user_rows(report)] == ["54.6", "20"]
    rows = summary([report])
    assert rows[0] == {"perplexity": "before", "train_support": "148.4"}
    assert not any("majority" in row["perplexity"] for row in rows)


def _report(accuracies: list[float], samples: list[int]) -> PersonalReport:
    users = [
        UserReport(
            number=number,
            name=str(number),
            group="A" if number % 2 else "B",
            samples=count,
            support=5,
            query=5,
            leaks=False,
            majority=0.5,
            curve=(point(0, 2.0, 0.1), point(1, 1.0, value)),
        )
        for number, (value, count) in enumerate(zip(accuracies, samples, strict=True))
    ]
    return summed_up(EvaluationSetting(0.1, (0, 1)), users)


def test_the_headline_counts_users_alike() -> None:
    report = _report([0.2, 0.8], [30, 10])

    assert report.mean == pytest.approx(0.5)
    assert report.weighted == pytest.approx(0.35)
    assert report.std == pytest.approx(0.3)
    assert report.before == pytest.approx(0.1)
    assert report.groups == {"A": pytest.approx(0.8), "B": pytest.approx(0.2)}
    assert [(each.steps, each.loss) for each in report.curve] == [(0, 2.0), (1, 1.0)]
    assert [each.value("accuracy") for each in report.curve] == pytest.approx([0.1, 0.5])


@pytest.mark.parametrize(("users", "expected"), [(1, 0.0), (10, 0.0), (11, 0.5), (20, 0.5), (30, 1.0)])
def test_the_worst_decile_is_a_tenth_of_the_users_rounded_up(users: int, expected: float) -> None:
    assert worst_decile([float(value) for value in reversed(range(users))]) == expected


def test_order_of_the_users_changes_no_number() -> None:
    rng = np.random.default_rng(0)
    accuracies, samples = rng.random(37).tolist(), rng.integers(1, 99, 37).tolist()
    one, other = _report(accuracies, samples), _report(accuracies[::-1], samples[::-1])

    assert (one.mean, one.std, one.weighted) == (other.mean, other.std, other.weighted)


@pytest.mark.parametrize(("single_class", "mean", "weighted"), [(False, 0.5, 0.4), (True, 0.6, 3 / 7)])
def test_the_trivial_levels_of_the_papers_partition(single_class: bool, mean: float, weighted: float) -> None:
    """per_fedavg.md 4.4: what a user's own most frequent class reaches."""
    spec, algorithm = whole()
    labels = np.repeat(np.arange(10), 130)
    parts = groups(labels, 20, a=8, single_class=single_class, seed=0)
    users = [_same(spec.sample.shape, number, labels[rows]) for number, rows in enumerate(parts)]

    report = evaluate_users(algorithm, spec.weights, users, alpha=0.1, steps=(), batch=BATCH)

    assert report.majority == pytest.approx(mean)
    assert report.majority_weighted == pytest.approx(weighted)


def _same(shape: tuple[int, ...], number: int, y: np.ndarray) -> User:
    x, labels = torch.zeros(len(y), *shape), torch.from_numpy(y)
    return User.of(number, train=(x, labels), test=(x, labels))


def test_the_curve_has_no_step_the_headline_and_what_was_asked_for() -> None:
    spec, algorithm = whole()

    report = evaluate_users(
        algorithm, spec.weights, users_of(spec, {0: (9, 5)}), alpha=0.1, steps=(4,), headline=2
    )

    assert [point.steps for point in report.curve] == [0, 2, 4]
    assert report.mean == report.curve[1].value("accuracy")


def test_a_longer_curve_leaves_its_earlier_points_as_they_are() -> None:
    spec, algorithm = whole()
    users = users_of(spec, {0: (30, 9), 1: (12, 9)})

    short, long = (
        evaluate_users(algorithm, spec.weights, users, alpha=0.2, steps=steps)
        for steps in ((1, 2), (1, 2, 7))
    )

    assert long.curve[:3] == short.curve


def test_a_small_user_adapts_to_all_its_samples_once() -> None:
    """The step is then that of the whole shard, whatever the seed (the spec's sampler clips)."""
    spec, algorithm = whole()
    users = users_of(spec, {0: (5, 9)})

    one, other = (
        evaluate_users(algorithm, spec.weights, users, alpha=0.2, batch=40, seed=seed).curve
        for seed in (0, 1)
    )

    for mine, theirs in zip(one, other, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)


def test_float64_users_give_float64_steps() -> None:
    spec, algorithm = whole()
    weights = {name: tensor.double() for name, tensor in spec.weights.items()}
    users = users_of(spec, {0: (12, 9)}, dtype=torch.float64)

    exact = evaluate_users(algorithm, weights, users, alpha=0.1)
    plain = evaluate_users(algorithm, spec.weights, users_of(spec, {0: (12, 9)}), alpha=0.1)

    assert exact.curve[-1].loss == pytest.approx(plain.curve[-1].loss, rel=1e-5)
    assert exact.curve[-1].loss != plain.curve[-1].loss


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": -1.0},
        {"alpha": float("nan")},
        {"batch": 0},
        {"steps": (-1,)},
        {"seed": -1},
        {"protocol": "test_support"},
        {"headline": -2},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        EvaluationSetting(**({"alpha": 0.1} | wrong))  # type: ignore[arg-type]


def test_shards_that_share_a_sample_are_refused() -> None:
    with pytest.raises(DataError, match="different rows"):
        User(0, torch.zeros(5, 2), torch.zeros(5), UserShards(np.arange(3), np.arange(2, 5)))


def test_an_algorithm_that_cannot_personalize_is_named() -> None:
    spec, algorithm = whole()

    with pytest.raises(ConfigError, match="'sgd' has no personalize function"):
        evaluate_users(replace(algorithm, personalize=None), spec.weights, [], alpha=0.1)


def test_no_user_is_no_report() -> None:
    spec, algorithm = whole()

    with pytest.raises(DataError, match="no user to evaluate"):
        evaluate_users(algorithm, spec.weights, [], alpha=0.1)
