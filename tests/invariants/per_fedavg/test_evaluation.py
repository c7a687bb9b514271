"""Invariants 25 to 27 of the Per-FedAvg spec: how personalized models are evaluated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from edgefl.analysis.personal.evaluate import User
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, prefixed
from edgefl_device.data.support import Protocol, SampleShards, held_out, split
from tests.analysis.personal.users import evaluate_users, users_of, whole
from tests.pairs import by_default
from tests.support.reference import Client, federated

SIZES = {0: (20, 9), 1: (12, 14), 2: (3, 6)}
PROTOCOLS: tuple[Protocol, ...] = ("train_support", "split_test", "paper_literal")
AT = ((0.5, 0), (0.0, 1), (0.0, 3))
"""A step size and a number of steps that change nothing."""
CLEAN: tuple[Protocol, ...] = ("train_support", "split_test")


def _spied(algorithm: Algorithm, look: Callable[[Tensors], None]) -> Algorithm:
    step = algorithm.personalize
    assert step is not None

    def fn(tensors: Tensors) -> Tensors:
        look(tensors)
        return step(tensors)

    return replace(algorithm, personalize=Function(step.name, fn, step.inputs))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "protocol"),
    by_default(
        product(["mlp", "resnet8"], PROTOCOLS),
        [*(("mlp", protocol) for protocol in PROTOCOLS), ("resnet8", "split_test")],
    ),
)
def test_25_evaluation_leaves_model_and_data_alone(model: str, protocol: Protocol) -> None:
    spec, algorithm = whole(model)
    weights = {name: tensor.clone() for name, tensor in spec.weights.items()}
    users = users_of(spec, SIZES)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    data = [(user.x.clone(), user.y.clone()) for user in users]

    evaluate_users(algorithm, weights, users, alpha=0.5, protocol=protocol)

    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert all(torch.equal(u.x, x) and torch.equal(u.y, y) for u, (x, y) in zip(users, data, strict=True))


def test_25_evaluation_draws_from_no_stream_of_training() -> None:
    spec, algorithm = whole()
    users = users_of(spec, SIZES)
    clients = [Client(user.number, user.x, user.y) for user in users]

    def trained(evaluating: bool) -> Tensors:
        weights = dict(spec.weights)
        for done in federated(algorithm, weights, clients, rounds=3, seed=4):
            weights = dict(done.weights)
            if evaluating:
                evaluate_users(algorithm, weights, users, alpha=0.1, seed=4)
        return weights

    plain, watched = trained(False), trained(True)

    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_25_evaluation_leaves_the_global_generators_alone() -> None:
    spec, algorithm = whole()
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[union-attr]

    evaluate_users(algorithm, spec.weights, users_of(spec, SIZES), alpha=0.1)

    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])  # type: ignore[arg-type]
    assert states[2] == random.getstate()


def test_25_every_method_gets_the_same_support_batches() -> None:
    spec, algorithm = whole()
    users = users_of(spec, SIZES)
    seen: dict[str, list[Tensors]] = {"one": [], "other": []}
    one = _spied(algorithm, seen["one"].append)
    other = _spied(
        replace(algorithm, name="other", hyper={**algorithm.hyper, "delta": 1.0}), seen["other"].append
    )

    evaluate_users(one, spec.weights, users, alpha=0.1)
    evaluate_users(
        other, {name: tensor + 0.1 for name, tensor in spec.weights.items()}, users[::-1], alpha=0.1
    )

    # The users came in another order: each has its own stream.
    steps = 10
    by_user = [seen["other"][at : at + steps] for at in range(0, len(seen["other"]), steps)]
    assert len(seen["one"]) == steps * len(users)
    for mine, others in zip(seen["one"], [step for user in by_user[::-1] for step in user], strict=True):
        assert torch.equal(mine["batch.0.x"], others["batch.0.x"])
        assert torch.equal(mine["batch.0.y"], others["batch.0.y"])


def test_25_another_seed_draws_other_batches() -> None:
    spec, algorithm = whole()
    drawn: list[Tensors] = []
    for seed in (0, 1):
        evaluate_users(
            _spied(algorithm, drawn.append),
            spec.weights,
            users_of(spec, {0: (30, 5)}),
            alpha=0.1,
            steps=(),
            seed=seed,
        )

    assert not torch.equal(drawn[0]["batch.0.x"], drawn[1]["batch.0.x"])


@pytest.mark.parametrize("protocol", CLEAN)
@pytest.mark.parametrize("user", range(5))
def test_26_support_and_query_have_no_sample_in_common(protocol: Protocol, user: int) -> None:
    labels = np.random.default_rng(user).integers(0, 4, 40)
    shards = SampleShards(np.arange(25), np.arange(25, 40))

    parts = split(protocol, shards, labels, seed=3, user=user)

    assert not set(parts.support) & set(parts.query)
    assert not parts.leaks
    assert len(parts.support) and len(parts.query)
    assert set(parts.query) <= set(shards.test)


def test_26_what_is_held_out_of_the_only_samples_is_apart_too() -> None:
    labels = np.repeat([0, 1, 2], [30, 15, 1])

    shards = held_out(labels, seed=0)

    assert sorted([*shards.train, *shards.test]) == list(range(46))
    assert np.bincount(labels[shards.test], minlength=3).tolist() == [6, 3, 0]


def test_26_the_literal_protocol_adapts_to_what_judges_it_and_says_so() -> None:
    spec, algorithm = whole()
    labels = np.arange(20) % 3
    parts = split("paper_literal", SampleShards(np.arange(12), np.arange(12, 20)), labels, seed=0)

    report = evaluate_users(
        algorithm, spec.weights, users_of(spec, SIZES), alpha=0.1, protocol="paper_literal"
    )

    assert set(parts.support) <= set(parts.query)
    assert parts.leaks
    assert report.leaks
    assert all(user.leaks for user in report.users)
    assert "LEAKS" in report.note


@pytest.mark.parametrize("protocol", CLEAN)
def test_26_a_clean_report_says_that_nothing_leaks(protocol: Protocol) -> None:
    spec, algorithm = whole()

    report = evaluate_users(algorithm, spec.weights, users_of(spec, SIZES), alpha=0.1, protocol=protocol)

    assert not report.leaks
    assert report.protocol == protocol
    assert "LEAKS" not in report.note


def test_26_steps_read_samples_of_the_support_only() -> None:
    spec, algorithm = whole()
    users = users_of(spec, SIZES)
    drawn: list[Tensors] = []
    for protocol in CLEAN:
        evaluate_users(_spied(algorithm, drawn.append), spec.weights, users[:1], alpha=0.1, protocol=protocol)
        parts = split(protocol, users[0].shards, users[0].y.numpy(), seed=0, user=0)
        allowed = {tuple(users[0].x[row].reshape(-1).tolist()) for row in parts.support}
        for step in drawn:
            assert {tuple(x.reshape(-1).tolist()) for x in step["batch.0.x"]} <= allowed
        drawn.clear()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("model", "alpha", "headline", "protocol"),
    by_default(
        [(model, *at, protocol) for model in ("mlp", "resnet8") for at in AT for protocol in PROTOCOLS],
        [
            *(("mlp", *at, protocol) for at in AT for protocol in PROTOCOLS),
            ("resnet8", *AT[1], "train_support"),
        ],
    ),
)
def test_27_without_steps_it_is_plain(model: str, alpha: float, headline: int, protocol: Protocol) -> None:
    spec, algorithm = whole(model)
    users = users_of(spec, SIZES)

    report = evaluate_users(algorithm, spec.weights, users, alpha=alpha, protocol=protocol, headline=headline)

    for user, found in zip(users, report.users, strict=True):
        query = split(protocol, user.shards, user.y.numpy(), seed=0, user=user.number).query
        plain = _plain(algorithm, spec.weights, user, query)
        assert found.value(headline) == plain == found.before
        assert found.after(headline).loss == found.curve[0].loss
    assert report.mean == report.before


@pytest.mark.parametrize("model", ["mlp", "resnet8", "resnet8 static"])
def test_27_a_step_of_size_0_leaves_every_tensor_as_it_is(model: str) -> None:
    spec, algorithm = whole(model)
    step = algorithm.personalize
    assert step is not None
    tensors = step.example(3) | prefixed("weights", spec.weights) | {"hyper.alpha": torch.zeros(())}

    after = step(tensors)

    assert all(torch.equal(after[name], tensors[name]) for name in after if name.startswith("weights."))


def test_27_a_step_of_some_size_does_change_accuracy() -> None:
    """Otherwise the tests above would show nothing."""
    spec, algorithm = whole()

    report = evaluate_users(algorithm, spec.weights, users_of(spec, SIZES), alpha=0.3)

    assert report.mean > report.before


def _plain(algorithm: Algorithm, weights: Tensors, user: User, rows: np.ndarray) -> float:
    at = torch.from_numpy(rows)
    batch = {"batch.0.x": user.x[at], "batch.0.y": user.y[at], "batch.0.mask": torch.ones(len(at))}
    found = algorithm.evaluate(prefixed("weights", weights) | batch)
    return float(found["metric.correct"]) / len(at)
