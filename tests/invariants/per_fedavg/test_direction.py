"""Invariants 1 to 3, 6, 7, 10 to 13 and 24 of the Per-FedAvg spec: what one step subtracts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors
from edgefl.objective.derivatives import gradient, product, shifted
from edgefl.objective.objective import Objective
from tests.invariants.fafed.quadratic import (
    NAME,
    Batch,
    alike,
    batches,
    direction,
    elu_net,
    flat,
    logistic,
    normal,
    positive,
    quadratic,
    random_batch,
    random_weights,
    relative,
    sample,
    stepped,
)
from tests.invariants.per_fedavg.wrong import FROM_ADAPTED, WRONG, wrong

D = 4
ALPHA = 0.3
EYE = torch.eye(D, dtype=torch.float64)
Make = Callable[..., Algorithm]


def right(objective: Objective, **options: float) -> Algorithm:
    return per_fedavg(objective, batch=1, mode="hf", **{"delta": 1e-3, **options})  # type: ignore[arg-type]


def user_batch(seed: int) -> tuple[Tensor, Tensor, Batch]:
    a, b = positive(D, seed), normal((D,), seed + 100)
    return a, b, (sample(a, b), torch.zeros(1, dtype=torch.int64))


def found(algorithm: Algorithm, w: Tensor, *given: Batch, **hyper: float) -> Tensor:
    return direction(algorithm, {NAME: w}, batches(*given), **hyper)[NAME]


def steers(v: Tensor, a: Tensor) -> tuple[Batch, Batch, Batch]:
    """Batches with wt = w and gt = v, whatever w and alpha are, and the Hessian ``a``: D', D, D''."""
    label, none = torch.zeros(1, dtype=torch.int64), torch.zeros(D, dtype=torch.float64)
    flat_loss = torch.zeros((D, D), dtype=torch.float64)
    return (sample(flat_loss, -v), label), (sample(flat_loss, none), label), (sample(a, none), label)


@pytest.mark.parametrize(
    ("mode", "power", "tolerance"), [("exact", 2, 1e-10), ("fo", 1, 1e-10), ("hf", 2, 1e-9)]
)
@pytest.mark.parametrize("seed", range(3))
def test_01_02_03_directions_on_quadratics(mode: str, power: int, tolerance: float, seed: int) -> None:
    a, b, batch = user_batch(seed)
    w = normal((D,), seed + 200)
    algorithm = per_fedavg(quadratic(D), batch=1, mode=mode, alpha=ALPHA)

    expected = torch.linalg.matrix_power(EYE - ALPHA * a, power) @ (a @ w - b)

    assert relative(found(algorithm, w, batch, batch, batch), expected) < tolerance


@pytest.mark.parametrize("kind", ["hf", "the gradient at w", FROM_ADAPTED])
def test_02_fails_for_what_is_not_first_order(kind: str) -> None:
    """The Hessian kept, the inner step left out, or both of two consecutive steps subtracted."""
    objective = quadratic(D)
    made = {
        "hf": lambda: per_fedavg(objective, batch=1, mode="hf", alpha=ALPHA),
        "the gradient at w": lambda: per_fedavg(objective, batch=1, mode="fo", alpha=0.0),
        FROM_ADAPTED: lambda: wrong(FROM_ADAPTED, objective, batch=1, alpha=ALPHA),
    }[kind]()
    a, b, batch = user_batch(0)
    w = normal((D,), 200)
    assert relative(found(made, w, batch, batch, batch), (EYE - ALPHA * a) @ (a @ w - b)) > 1e-2


def equals_exact(make: Make, delta: float) -> bool:
    """Invariant 3 on three users."""
    objective = quadratic(D)
    exact, algorithm = (
        per_fedavg(objective, batch=1, mode="exact", alpha=ALPHA),
        make(objective, alpha=ALPHA, delta=delta),
    )
    errors = []
    for seed in range(3):
        given, w = [user_batch(10 * seed + k)[2] for k in range(3)], normal((D,), seed + 200)
        errors.append(relative(found(algorithm, w, *given), found(exact, w, *given)))
    return max(errors) < 1e-9


@pytest.mark.parametrize("delta", [1e-3, 1.0, 10.0])
def test_03_hf_equals_exact_for_every_delta_on_quadratics(delta: float) -> None:
    assert equals_exact(right, delta)


@pytest.mark.parametrize("delta0", [1e-3, 1.0, 10.0])
def test_03_so_does_the_scale_free_form(delta0: float) -> None:
    assert equals_exact(
        lambda objective, alpha, delta: per_fedavg(objective, batch=1, alpha=alpha, delta0=delta0), 1.0
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [*WRONG, FROM_ADAPTED])
def test_03_fails_for_every_wrong_variant(kind: str) -> None:
    assert not equals_exact(lambda objective, **options: wrong(kind, objective, batch=1, **options), 1e-3)


@pytest.mark.parametrize("make", [logistic, elu_net])
def test_06_exact_is_the_gradient_of_the_adapted_loss(
    make: Callable[[], Objective],
) -> None:
    objective = make(5) if make is logistic else make()
    w, outer, inner = (
        random_weights(objective, 1),
        random_batch(objective, 6, 2),
        random_batch(objective, 4, 3),
    )
    algorithm = per_fedavg(
        objective, batch=6, inner_batch=4, mode="exact", alpha=ALPHA, hessian_batch="inner"
    )

    expected = flat(adapted_gradient(objective, w, outer, [inner]))

    assert relative(flat(direction(algorithm, w, batches(outer, inner))), expected) < 1e-7
    independent = per_fedavg(objective, batch=6, inner_batch=4, mode="exact", alpha=ALPHA)
    other = batches(outer, inner, random_batch(objective, 6, 4))
    assert relative(flat(direction(independent, w, other)), expected) > 1e-3


def adapted_gradient(objective: Objective, w: Tensors, outer: Batch, inner: list[Batch]) -> Tensors:
    """By automatic differentiation of ``loss(w_m; D')`` through the inner steps."""

    def adapted_loss(at: Tensors) -> Tensor:
        for x, y in inner:
            grads = torch.func.grad(lambda p, x=x, y=y: objective(p, {}, x, y)[0])(at)
            at = {name: at[name] - ALPHA * grads[name] for name in at}
        return objective(at, {}, *outer)[0]

    return torch.func.grad(adapted_loss)(w)


def dense_hessian(objective: Objective, w: Tensors, batch: Batch) -> Tensor:
    return torch.func.hessian(lambda vector: objective(alike(vector, w), {}, *batch)[0])(flat(w))


@pytest.mark.parametrize("make", [logistic, elu_net])
def test_07_exact_with_a_batch_of_its_own_is_the_dense_formula(make: Callable[[], Objective]) -> None:
    objective = make(5) if make is logistic else make()
    w = random_weights(objective, 1)
    outer, inner, hessian = (random_batch(objective, 6, seed) for seed in (2, 3, 4))
    algorithm = per_fedavg(objective, batch=6, mode="exact", alpha=ALPHA)

    wt = shifted(w, gradient(objective, w, batches(inner))[2], torch.tensor(-ALPHA, dtype=torch.float64))
    gt = flat(gradient(objective, wt, batches(outer))[2])
    expected = gt - ALPHA * dense_hessian(objective, w, hessian) @ gt

    assert relative(flat(direction(algorithm, w, batches(outer, inner, hessian))), expected) < 1e-7
    at_adapted = gt - ALPHA * dense_hessian(objective, wt, hessian) @ gt
    assert relative(at_adapted, expected) > 1e-4


@pytest.mark.parametrize("make", [logistic, elu_net])
def test_10_hessian_vector_products_are_symmetric_and_linear(make: Callable[[], Objective]) -> None:
    objective = make(5) if make is logistic else make()
    w, given = random_weights(objective, 1), batches(random_batch(objective, 6, 2))
    u, v = (random_weights(objective, seed, scale=1.0) for seed in (3, 4))

    def hessian(along: Tensors) -> Tensor:
        return flat(product(objective, w, given, along))

    both = alike(2.5 * flat(u) - 0.5 * flat(v), w)
    assert abs(flat(u) @ hessian(v) - flat(v) @ hessian(u)) < 1e-12
    assert (hessian(both) - 2.5 * hessian(u) + 0.5 * hessian(v)).abs().max() < 1e-12


def follows_the_gradient(make: Make) -> bool:
    """Invariant 11: the correction of a vector v is alpha A v, and that of v turned is alpha A times that."""
    a, v, w = positive(D, 1), normal((D,), 2), normal((D,), 3)
    turned = torch.linalg.qr(normal((D, D), 4))[0] @ v
    algorithm = make(quadratic(D), alpha=ALPHA, delta=0.5)
    corrections = [along - found(algorithm, w, *steers(along, a)) for along in (v, turned)]
    expected = [ALPHA * a @ along for along in (v, turned)]
    return all(relative(c, e) < 1e-9 for c, e in zip(corrections, expected, strict=True))


def test_11_the_curvature_is_taken_along_the_outer_gradient() -> None:
    assert follows_the_gradient(right)
    assert follows_the_gradient(
        lambda objective, alpha, delta: per_fedavg(objective, batch=1, alpha=alpha, mode="exact")
    )


@pytest.mark.parametrize("kind", WRONG)
def test_11_fails_for_every_wrong_correction(kind: str) -> None:
    assert not follows_the_gradient(lambda objective, **options: wrong(kind, objective, batch=1, **options))


def is_scaled_by_alpha(make: Make) -> bool:
    """Invariant 12: (gt - G) / alpha is not zero and does not depend on alpha."""
    a, v, w = positive(D, 5), normal((D,), 6), normal((D,), 7)
    algorithm = make(quadratic(D), delta=0.5)
    ratios = [(v - found(algorithm, w, *steers(v, a), alpha=alpha)) / alpha for alpha in (0.1, 0.5, 2.0)]
    return float(ratios[0].norm()) > 1e-3 and all(relative(each, ratios[0]) < 1e-9 for each in ratios)


@pytest.mark.parametrize("mode", ["hf", "exact"])
def test_12_the_correction_is_proportional_to_alpha(mode: str) -> None:
    assert is_scaled_by_alpha(lambda objective, delta: per_fedavg(objective, batch=1, mode=mode, delta=delta))


@pytest.mark.parametrize(
    "kind", ["alpha forgotten", "plus-perturbed twice", "first order under the plain name"]
)
def test_12_fails_for_wrong_variants(kind: str) -> None:
    assert not is_scaled_by_alpha(lambda objective, **options: wrong(kind, objective, batch=1, **options))


def stays_without_learning_rate(algorithm: Algorithm) -> bool:
    """Invariant 13, bit for bit."""
    given, w = batches(*(user_batch(seed)[2] for seed in range(5))), normal((D,), 8)
    return all(
        torch.equal(stepped(algorithm, {NAME: w}, given, lr=0.0, alpha=alpha)[NAME], w)
        for alpha in (0.01, 0.3, 5.0)
    )


@pytest.mark.parametrize("mode", ["fo", "hf", "exact"])
@pytest.mark.parametrize("inner_steps", [1, 2])
def test_13_the_outer_step_starts_where_the_inner_one_did(mode: str, inner_steps: int) -> None:
    assert stays_without_learning_rate(per_fedavg(quadratic(D), batch=1, mode=mode, inner_steps=inner_steps))


def test_13_fails_for_two_consecutive_steps() -> None:
    assert not stays_without_learning_rate(wrong(FROM_ADAPTED, quadratic(D), batch=1))


@pytest.mark.parametrize("inner_steps", [1, 2, 3])
def test_24_several_inner_steps_are_the_gradient_through_all_of_them(inner_steps: int) -> None:
    objective = elu_net()
    w, outer = random_weights(objective, 1), random_batch(objective, 6, 2)
    inner = [random_batch(objective, 6, 3 + j) for j in range(inner_steps)]
    unread = random_batch(objective, 6, 9)
    algorithm = per_fedavg(
        objective, batch=6, mode="exact", alpha=ALPHA, inner_steps=inner_steps, hessian_batch="inner"
    )

    given = batches(outer, *(each for batch in inner for each in (batch, unread)))

    expected = flat(adapted_gradient(objective, w, outer, inner))
    assert relative(flat(direction(algorithm, w, given)), expected) < 1e-7


@pytest.mark.parametrize(("mode", "tolerance"), [("exact", 1e-12), ("hf", 1e-6)])
def test_24_several_inner_steps_are_the_product_of_the_factors(mode: str, tolerance: float) -> None:
    objective = elu_net()
    w, outer = random_weights(objective, 1), random_batch(objective, 6, 2)
    others = [random_batch(objective, 6, 3 + j) for j in range(6)]
    algorithm = per_fedavg(objective, batch=6, mode=mode, alpha=ALPHA, inner_steps=3)

    points, alpha = [w], torch.tensor(ALPHA, dtype=torch.float64)
    for inner in others[::2]:
        points.append(shifted(points[-1], gradient(objective, points[-1], batches(inner))[2], -alpha))
    expected = flat(gradient(objective, points[3], batches(outer))[2])
    for j in (2, 1, 0):
        expected = expected - ALPHA * dense_hessian(objective, points[j], others[2 * j + 1]) @ expected

    assert relative(flat(direction(algorithm, w, batches(outer, *others))), expected) < tolerance


def test_24_first_order_keeps_only_the_last_gradient() -> None:
    objective = elu_net()
    w, given = random_weights(objective, 1), [random_batch(objective, 6, 2 + j) for j in range(4)]
    algorithm = per_fedavg(objective, batch=6, mode="fo", alpha=ALPHA, inner_steps=2)

    at, alpha = w, torch.tensor(ALPHA, dtype=torch.float64)
    for inner in (given[1], given[3]):
        at = shifted(at, gradient(objective, at, batches(inner))[2], -alpha)

    expected = flat(gradient(objective, at, batches(given[0]))[2])
    assert relative(flat(direction(algorithm, w, batches(*given))), expected) < 1e-12
