"""FedBAT's local training: invariants 15 to 19 of fedbat.md, section 7."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.codecs.binarize import StepSize, draw, inside
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.invariants.embracingfl.tiny import tiny, weights_of
from tests.invariants.fedbat.tiny import (
    BATCH,
    Feed,
    Plain,
    Trace,
    algorithm_of,
    decoded,
    drawing,
    regression,
    uniform,
    walk,
)
from tests.support.reference import partial_average, run_round

SPEC = tiny("cnn")
FEED, STEPS, RHO = Feed.of(SPEC), 6, 6.0
TRAINED = sorted(name for name, _ in SPEC.module.named_parameters())


def fedavg(steps: int, feed: Feed = FEED) -> Tensors:
    """m of FedAvg's local training: what is left of the weights minus what they were."""
    algorithm = sgd(_objective(), batch=BATCH, steps=steps, lr=0.1, momentum=0.0, weight_decay=0.0)
    left = run_round(algorithm, SPEC.weights, feed).update
    return {name: left[name] - SPEC.weights[name] for name in left}


@cache
def trained(**options: float) -> Trace:
    """Every step of a round with these options, made once; nobody changes it."""
    return walk(algorithm_of(SPEC, **options), SPEC.weights, FEED)


def _objective() -> Objective:
    return Objective.of(OutputSide(SPEC, 0, 1))


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 2e-6 * (1 + float(expected.abs().max())))


# -- the loop --------------------------------------------------------------------------------------------------


def test_i15_every_round_begins_with_zeros() -> None:
    first = trained().states[0]
    assert all(not tensor.any() for tensor in select(first, "change").values())
    assert not first["log_scale"].any()


def test_i15_the_received_weights_are_the_same_bits_after_training() -> None:
    trace = trained()
    for name in TRAINED:
        assert torch.equal(trace.states[-1][f"weights.{name}"], SPEC.weights[name])
    assert not any(
        f"state.weights.{name}" in phase.function(_ready(trace, index))
        for phase, index in zip(algorithm_of(SPEC).phases, (0, STEPS // 2), strict=True)
        for name in TRAINED
    )


def _ready(trace: Trace, index: int) -> Tensors:
    return prefixed("state", trace.states[index]) | trace.given[index]


def test_i15_no_state_of_a_client_survives_its_round() -> None:
    algorithm, weights = drawing(algorithm_of(SPEC), 3), weights_of(SPEC)
    once = run_round(algorithm, weights, FEED)
    run_round(algorithm, weights, replace(FEED, seed=9))
    again = run_round(algorithm, weights, FEED)
    assert once.carry == {} == again.carry
    assert all(torch.equal(once.update[name], again.update[name]) for name in once.update)


@pytest.mark.parametrize(
    ("phi", "steps", "warm"), [(0.5, 7, 3), (0.3, 10, 3), (0.7, 90, 63), (1.0, 4, 4), (0.29, 100, 29)]
)
def test_i16_floor_of_phi_tau_steps_are_in_full_precision(phi: float, steps: int, warm: int) -> None:
    phases = algorithm_of(SPEC, phi=phi, steps=steps).phases
    assert [(phase.name, phase.steps) for phase in phases] == [
        (name, count) for name, count in (("warmup", warm), ("binarize", steps - warm)) if count
    ]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_i16_during_the_warm_up_m_is_that_of_fedavg(count: int) -> None:
    trace, expected = trained(), fedavg(count)
    for name in TRAINED:
        assert close(trace.states[count][f"change.{name}"], expected[name]), name


def test_i16_alpha_prime_is_the_mean_size_after_the_warm_up_and_stays() -> None:
    states = trained().states
    ended = states[STEPS // 2]
    expected = torch.stack([ended[f"change.{name}"].abs().mean() for name in TRAINED])
    assert torch.allclose(ended["scale"], expected, rtol=1e-6)
    assert all(torch.equal(state["scale"], ended["scale"]) for state in states[STEPS // 2 :])
    assert not torch.equal(states[-1]["log_scale"], ended["log_scale"])


def test_i17_phi_of_one_is_fedavg_binarized_afterwards() -> None:
    noise = uniform(algorithm_of(SPEC, phi=1.0).finish, torch.Generator().manual_seed(7))
    algorithm = drawing(algorithm_of(SPEC, phi=1.0), 7)
    found = decoded(algorithm, SPEC.weights, run_round(algorithm, SPEC.weights, FEED).update)
    m = fedavg(STEPS)
    for name in TRAINED:
        alpha = m[name].abs().mean()
        expected = alpha * draw(m[name], alpha, noise[f"noise.{name}"])
        wrong = np.abs(found[name] - expected.numpy()) > 1e-5 * float(alpha)
        assert wrong.sum() <= 1, (
            name
        )  # m is the same but for rounding, which may move a threshold across a draw


def test_i18_clipped_entries_do_not_move() -> None:
    trace, clipped = walk(algorithm_of(SPEC, steps=10), SPEC.weights, FEED), 0
    for before, after, phase in zip(trace.states, trace.states[1:], trace.phases, strict=False):
        if phase == "warmup":
            continue
        alpha = StepSize(6.0).of(before["scale"], before["log_scale"])
        for number, name in enumerate(TRAINED):
            old, new = before[f"change.{name}"], after[f"change.{name}"]
            out = ~inside(old, alpha[number])
            assert torch.equal(old[out], new[out])
            clipped += int(out.sum())
    assert clipped > 100


def test_i19_the_gradient_of_m_is_the_mask_times_that_of_the_weights() -> None:
    trace = trained()
    before, after, given = trace.states[-2], trace.states[-1], trace.given[-1]
    alpha = StepSize(6.0).of(before["scale"], before["log_scale"])
    at = select(before, "weights")
    for number, name in enumerate(TRAINED):
        m, size = before[f"change.{name}"], alpha[number]
        at[name] = at[name] + size * draw(m, size, given[f"noise.{name}"])
    batch = {name: tensor for name, tensor in given.items() if name.startswith("batch.")}
    grads = gradient(_objective(), at, batch)[2]
    for number, name in enumerate(TRAINED):
        m = before[f"change.{name}"]
        expected = m - 0.1 * grads[name] * inside(m, alpha[number])
        assert close(after[f"change.{name}"], expected), name


def distance(found: Tensors, expected: Tensors) -> float:
    """Largest difference of any tensor, relative to how far the step moved it."""
    return max(
        float((found[n].double() - expected[n]).abs().max() / expected[n].abs().max()) for n in expected
    )


@pytest.mark.parametrize("rho", [0.0, RHO])
def test_a_step_is_autograd_through_the_printed_operator(rho: float) -> None:
    trace = trained(**({} if rho == RHO else {"rho": rho}))
    for index in range(STEPS // 2, STEPS):
        expected = Plain(SPEC, rho)(trace.states[index], trace.given[index])
        if not rho:
            assert not expected.pop("log_scale").any() and not trace.states[index + 1]["log_scale"].any()
        assert distance(trace.states[index + 1], expected) < 1e-4


@pytest.mark.parametrize(
    "mistake",
    ["another draw backward", "m by the new alpha", "alpha' again", "clipped entries move"],
)
def test_a_step_differs_from_one_with_a_mistake(mistake: str) -> None:
    trace = trained()
    apart = [
        distance(trace.states[index + 1], Plain(SPEC, wrong=mistake)(trace.states[index], trace.given[index]))
        for index in range(STEPS // 2, STEPS)
    ]
    assert max(apart) > 1e-3


def test_momentum_acts_on_m_after_a_plain_warm_up() -> None:
    options = {"momentum": 0.9, "weight_decay": 1e-2}
    trace = trained(**options)
    plain = sgd(_objective(), batch=BATCH, steps=STEPS // 2, lr=0.1, **options)
    left = run_round(plain, SPEC.weights, FEED).update
    for name in TRAINED:
        assert close(trace.states[STEPS // 2][f"change.{name}"], left[name] - SPEC.weights[name]), name


@pytest.mark.parametrize(
    "options", [{"momentum": 0.9}, {"weight_decay": 1e-2}, {"momentum": 0.9, "weight_decay": 1e-2}]
)
def test_momentum_and_decay_are_those_of_autograd(
    options: dict[str, float],
) -> None:
    """v <- momentum v + g [|m| <= alpha] with g of F(W) + decay/2 |W|^2 over kernels, m <- m - lr v; alpha_e knows no v."""
    trace = trained(**options)
    decay, momentum = options.get("weight_decay", 0.0), options.get("momentum", 0.0)
    for index in range(STEPS // 2, STEPS):
        before, after = trace.states[index], trace.states[index + 1]
        plain = Plain(SPEC, 6.0, decay=decay)(before, trace.given[index])
        expected = {"log_scale": plain["log_scale"]}
        for name in TRAINED:
            m = before[f"change.{name}"].double()
            v = (m - plain[f"change.{name}"]) / 0.1
            if momentum:
                v = v + momentum * before[f"momentum.{name}"]
            expected[f"change.{name}"] = m - 0.1 * v
        assert distance(after, expected) < 1e-4


# -- several clients -------------------------------------------------------------------------------------------


def test_rounds_of_clients_learn() -> None:
    spec = regression(1)
    feeds = [Feed.linear(spec, seed=1), replace(Feed.linear(spec, seed=1), seed=2)]
    algorithm = algorithm_of(spec, batch=32, steps=20, lr=0.02)
    weights, losses = weights_of(spec), []
    for number in range(12):
        results = [
            run_round(drawing(algorithm, 10 * number + k), weights, replace(feed, seed=100 * number + k))
            for k, feed in enumerate(feeds)
        ]
        changes = [decoded(algorithm, weights, result.update) for result in results]
        uploads = [
            (dict.fromkeys(weights), {n: weights[n] + torch.from_numpy(c[n]) for n in weights})
            for c in changes
        ]
        weights = partial_average(weights, uploads)
        losses.append(float(results[0].metrics[0]["loss"]))
    assert losses[-1] < 0.5 * losses[0]
