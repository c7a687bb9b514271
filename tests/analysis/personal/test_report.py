"""What a report says of all users together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from edgefl.algorithms.personalize import personalize
from edgefl.algorithms.quantized.binary import binarize
from edgefl.analysis.heterogeneity.losses import FlatLoss, Shard, batches
from edgefl.analysis.personal.evaluate import User
from edgefl.analysis.personal.finished import FinishedRun
from edgefl.analysis.personal.report import (
    EvaluationSetting,
    PersonalReport,
    UserReport,
    summarize,
    summary,
    user_rows,
    worst_decile,
)
from edgefl.api.analysis import heterogeneity
from edgefl.api.deploy import deploy
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.data.dataset import Dataset, OtherInput
from edgefl.data.groups import groups
from edgefl.models.split import split
from edgefl.models.zoo.basic import bilstm
from edgefl.objective.derivatives import count_derivatives
from edgefl.objective.objective import Objective
from edgefl.submodels.catalog import build
from edgefl_device.data.support import SampleShards
from edgefl_device.personal.personalize import AdaptationPoint
from tests.analysis.personal.conftest import Leave
from tests.analysis.personal.users import BATCH, evaluate_users, personal, users_of, whole
from tests.invariants.embracingfl.tiny import samples, tiny
from tests.models.test_inputs import CLASSES, LENGTH, TEXT, WORDS, batch, objective_of, reader
from tests.support.arrays import as_tensors, weights_of
from tests.support.errors import ConfigError, DataError, refuses
from tests.support.reference import run_round


def point(steps: int, loss: float, value: float, metric: str = "accuracy") -> AdaptationPoint:
    return AdaptationPoint(steps=steps, loss=loss, metrics={metric: value})


def test_perplexity_is_less_is_better() -> None:
    plain = _report([0.2, 0.8], [30, 10])
    users = [
        replace(user, curve=(point(0, 5.0, 148.4, "perplexity"), point(1, 4.0, after, "perplexity")))
        for user, after in zip(plain.users, (20.0, 54.6), strict=True)
    ]

    report = summarize(EvaluationSetting(0.1, (0, 1)), users)

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
    return summarize(EvaluationSetting(0.1, (0, 1)), users)


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
    with refuses(DataError, user=0):
        User(0, torch.zeros(5, 2), torch.zeros(5), SampleShards(np.arange(3), np.arange(2, 5)))


def test_an_algorithm_that_cannot_personalize_is_named() -> None:
    spec, algorithm = whole()

    with pytest.raises(ConfigError, match="'sgd' has no personalize function"):
        evaluate_users(replace(algorithm, personalize=None), spec.weights, [], alpha=0.1)


def test_no_user_is_no_report() -> None:
    spec, algorithm = whole()

    with refuses(DataError, left_out=None):
        evaluate_users(algorithm, spec.weights, [], alpha=0.1)


# -- the step that adapts: plain SGD on what travels, whatever a tier holds --------------------------------


def _given(name: str, alpha: float = 0.1) -> tuple[Tensors, Tensors]:
    """(batch and scalars, weights) of a small model."""
    spec = tiny(name)
    x, y = samples(spec, BATCH)
    given = {"batch.0.x": x, "batch.0.y": y, "hyper.alpha": torch.tensor(alpha)}
    return given, dict(spec.weights)


@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet8", "resnet8 static"])
def test_a_step_is_that_of_plain_sgd_bit_for_bit(model: str) -> None:
    _, algorithm = whole(model)
    given, weights = _given(model)
    step = algorithm.personalize
    assert step is not None

    after = select(step(given | prefixed("weights", weights)), "weights")

    batch = {name: given[name] for name in ("batch.0.x", "batch.0.y")}
    short = run_round(_one_step(algorithm), weights, lambda _function, _step: batch, hyper={"lr": 0.1})
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], short.update[name]) for name in after)


def _one_step(algorithm: Algorithm) -> Algorithm:
    return replace(algorithm, phases=(replace(algorithm.phases[0], steps=1),))


def test_one_gradient_is_taken() -> None:
    _, algorithm = whole()
    given, weights = _given("mlp")
    assert algorithm.personalize is not None

    with count_derivatives() as counts:
        algorithm.personalize(given | prefixed("weights", weights))

    assert (counts.gradients, counts.products) == (1, 0)


def test_of_an_importance_tier_the_values_move_and_the_mask_stays() -> None:
    spec = tiny("cnn")
    submodel = build(spec, "importance", gamma=0.25)
    algorithm = personal(submodel)
    arrays = submodel.place(weights_of(spec), 1).payload
    payload = as_tensors(arrays)
    given, _ = _given("cnn")
    assert algorithm.personalize is not None

    after = select(algorithm.personalize(given | prefixed("weights", payload)), "weights")

    assert after.keys() == payload.keys()
    moved = {name for name in payload if not torch.equal(after[name], payload[name])}
    assert "submodel.values" in moved
    assert not moved & {"submodel.mask", "submodel.theta"}


def test_moving_statistics_follow_the_batch() -> None:
    _, algorithm = whole("resnet8")
    given, weights = _given("resnet8")
    assert algorithm.personalize is not None

    after = select(algorithm.personalize(given | prefixed("weights", weights)), "weights")

    statistics = [name for name in weights if name.endswith("running_mean")]
    assert statistics
    assert all(not torch.equal(after[name], weights[name]) for name in statistics)


def test_dropout_draws_from_the_noise_that_it_is_given() -> None:
    spec = bilstm(length=8, vocabulary=20, features=6, hidden=5, rate=0.5, seed=1)
    step = personalize(Objective.of(build(spec, "output_side", cut=0)), 4)
    tensors = step.example(0)
    noise = [name for name in step.inputs if name.startswith("noise.")]
    assert noise

    kept, dropped = (
        step(tensors | {name: torch.full_like(tensors[name], value) for name in noise})["metric.loss"]
        for value in (0.99, 0.01)
    )

    assert not torch.equal(kept, dropped)


def test_binary_weights_are_adapted_as_they_are_read() -> None:
    """With the objective that evaluation has, the gradient is that at the binary weights."""
    objective = Objective.of(build(tiny("mlp"), "output_side", cut=0))
    given, weights = _given("mlp")
    tensors = given | prefixed("weights", weights)

    plain, binary = (personalize(each, BATCH)(tensors) for each in (objective, binarize(objective)))

    assert not torch.equal(plain["metric.loss"], binary["metric.loss"])
    assert set(plain) == set(binary)


# -- users of a model with several inputs: what is told of them reads all inputs ---------------------------


def texts(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The class of a text is that of its last word; what comes after it is noise that the mask hides."""
    random = np.random.default_rng(seed)
    mask = (np.arange(LENGTH) < random.integers(1, LENGTH + 1, (count, 1))).astype(np.int64)
    words = random.integers(WORDS, size=(count, LENGTH))
    return words, mask, words[np.arange(count), mask.sum(1) - 1] % CLASSES


@pytest.fixture
def folder(leave: Leave, tmp_path: Path) -> Path:
    (x, mask, y), (test_x, test_mask, test_y) = texts(90, 0), texts(60, 1)
    others = {"attention_mask": OtherInput(mask, test_mask, 2)}
    data = Dataset.of(x, y, test_x, test_y, below=WORDS, classes=CLASSES, others=others)
    return leave(
        model={"name": "tests.models.test_inputs:Reader"},
        data={"name": "file", "file": str(data.save(tmp_path / "texts.npz"))},
        tiers={"strong": {"count": 2}, "weak": {"cut": 2, "count": 1}},
    )


@pytest.mark.slow
def test_the_users_of_a_run_are_judged_with_all_inputs(folder: Path) -> None:
    finished = FinishedRun.open(folder)

    report = finished.report(EvaluationSetting(0.3, (20,), 8))

    assert [user.name for user in report.users] == ["strong-0", "strong-1", "weak-0"]
    assert report.curve[-1].loss < report.curve[0].loss
    for user in finished.users:
        user.others["attention_mask"].fill_(1)
    assert finished.report(EvaluationSetting(0.3, (), 8)).curve[0].loss != report.curve[0].loss


@pytest.mark.slow
def test_the_run_is_deployed_and_its_users_are_compared(folder: Path) -> None:
    made = deploy(folder / "model.safetensors")
    assert made.artifact.inputs == ("ids", "attention_mask")

    _, report = heterogeneity(folder, users=1, samples=12)
    assert len(report.gradients.norms) == 3 and report.gradients.largest > 0


def test_gradients_of_a_user_are_those_of_the_module_with_its_mask() -> None:
    module, given = reader(), batch(8)
    spec = split(module, sample=TEXT, classes=CLASSES)
    losses = FlatLoss(objective_of(spec), spec.weights)
    parts = batches(Shard(given["x"], given["y"], {"attention_mask": given["attention_mask"]}), 0)

    found = losses.mean(lambda part: losses.gradient(losses.start, part), parts)

    out = module(given["x"], given["attention_mask"])
    nn.functional.cross_entropy(out, given["y"]).backward()
    expected = torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None])
    torch.testing.assert_close(found.sort().values, expected.sort().values, rtol=1e-4, atol=1e-6)
