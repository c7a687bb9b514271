"""Invariants 1 to 3, 6, 7, 10 to 13 and 24 of the Per-FedAvg spec: what one step subtracts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgefl.algorithms.baselines.fedavg import fedavg_update
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.spec import sequential
from edgefl.objective.derivatives import Counts, count_derivatives, difference_hvp, gradient, hvp, norm, shift
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.invariants.embracingfl.tiny import samples, tiny
from tests.invariants.fafed.quadratic import (
    NAME,
    Batch,
    Value,
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
    user,
)
from tests.rings.rows import mostly_slow
from tests.support.reference import Client, drawn, federated

D = 4
ALPHA = 0.3
EYE = torch.eye(D, dtype=torch.float64)
Make = Callable[..., Algorithm]


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


@pytest.mark.parametrize("reach", ["delta", "delta0"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 10.0])
def test_03_hf_equals_exact_for_every_delta_on_quadratics(reach: str, size: float) -> None:
    objective = quadratic(D)
    exact = per_fedavg(objective, batch=1, mode="exact", alpha=ALPHA)
    algorithm = per_fedavg(objective, batch=1, mode="hf", alpha=ALPHA, **{reach: size})  # type: ignore[arg-type]
    for seed in range(3):
        given, w = [user_batch(10 * seed + k)[2] for k in range(3)], normal((D,), seed + 200)
        assert relative(found(algorithm, w, *given), found(exact, w, *given)) < 1e-9


@pytest.mark.parametrize("make", [logistic, elu_net])
def test_06_exact_is_the_gradient_of_the_adapted_loss(make: Callable[[], Objective]) -> None:
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

    wt = shift(w, gradient(objective, w, batches(inner))[2], torch.tensor(-ALPHA, dtype=torch.float64))
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
        return flat(hvp(objective, w, given, along))

    both = alike(2.5 * flat(u) - 0.5 * flat(v), w)
    assert abs(flat(u) @ hessian(v) - flat(v) @ hessian(u)) < 1e-12
    assert (hessian(both) - 2.5 * hessian(u) + 0.5 * hessian(v)).abs().max() < 1e-12


@pytest.mark.parametrize("mode", ["hf", "exact"])
def test_11_the_curvature_is_taken_along_the_outer_gradient(mode: str) -> None:
    """The correction of a vector v is alpha A v, and that of v turned is alpha A times that."""
    a, v, w = positive(D, 1), normal((D,), 2), normal((D,), 3)
    algorithm = per_fedavg(quadratic(D), batch=1, mode=mode, alpha=ALPHA, delta=0.5 if mode == "hf" else None)
    for along in (v, torch.linalg.qr(normal((D, D), 4))[0] @ v):
        correction = along - found(algorithm, w, *steers(along, a))
        assert relative(correction, ALPHA * a @ along) < 1e-9


@pytest.mark.parametrize("mode", ["hf", "exact"])
def test_12_the_correction_is_proportional_to_alpha(mode: str) -> None:
    """(gt - G) / alpha is not zero and does not depend on alpha."""
    a, v, w = positive(D, 5), normal((D,), 6), normal((D,), 7)
    algorithm = per_fedavg(quadratic(D), batch=1, mode=mode, delta=0.5)
    ratios = [(v - found(algorithm, w, *steers(v, a), alpha=alpha)) / alpha for alpha in (0.1, 0.5, 2.0)]
    assert float(ratios[0].norm()) > 1e-3
    assert all(relative(each, ratios[0]) < 1e-9 for each in ratios)


@pytest.mark.parametrize("mode", ["fo", "hf", "exact"])
@pytest.mark.parametrize("inner_steps", [1, 2])
def test_13_the_outer_step_starts_where_the_inner_one_did(mode: str, inner_steps: int) -> None:
    """Without learning rate, nothing moves: bit for bit."""
    algorithm = per_fedavg(quadratic(D), batch=1, mode=mode, inner_steps=inner_steps)
    given, w = batches(*(user_batch(seed)[2] for seed in range(5))), normal((D,), 8)
    for alpha in (0.01, 0.3, 5.0):
        assert torch.equal(stepped(algorithm, {NAME: w}, given, lr=0.0, alpha=alpha)[NAME], w)


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
        points.append(shift(points[-1], gradient(objective, points[-1], batches(inner))[2], -alpha))
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
        at = shift(at, gradient(objective, at, batches(inner))[2], -alpha)

    expected = flat(gradient(objective, at, batches(given[0]))[2])
    assert relative(flat(direction(algorithm, w, batches(*given))), expected) < 1e-12


# -- invariants 4, 5 and 34 of the Per-FedAvg spec: how good a quotient of gradients is --------------------


FEATURES = 4


def scalar(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=dtype)


@dataclass(frozen=True)
class At:
    """Where a quotient is taken: an objective, weights, one batch and a vector."""

    objective: Objective
    w: Tensors
    given: Tensors
    v: Tensors

    @classmethod
    def of(cls, objective: Objective, seed: int) -> At:
        given = batches(random_batch(objective, 8, seed + 1))
        return cls(
            objective, random_weights(objective, seed), given, random_weights(objective, seed + 2, 1.0)
        )

    def central(self, delta: float) -> Tensor:
        return flat(difference_hvp(self.objective, self.w, self.given, self.v, scalar(delta)))

    def exact(self) -> Tensor:
        return flat(hvp(self.objective, self.w, self.given, self.v))


@pytest.mark.parametrize("seed", range(3))
def test_04_halving_delta_divides_the_error_by_four(seed: int) -> None:
    at = At.of(logistic(FEATURES), seed)
    deltas = [0.1 / 2**k for k in range(5)]
    errors = [float((at.central(delta) - at.exact()).norm()) for delta in deltas]
    ratios = [larger / smaller for larger, smaller in itertools.pairwise(errors)]
    assert all(3.6 < ratio < 4.4 for ratio in ratios), ratios


@pytest.mark.parametrize("form", ["delta", "delta0"])
def test_04_so_does_the_error_of_a_step(form: str) -> None:
    objective = logistic(FEATURES)
    w, given = (
        random_weights(objective, 1, 2.0),
        batches(*(random_batch(objective, 8, 2 + k) for k in range(3))),
    )
    exact = flat(direction(per_fedavg(objective, batch=8, mode="exact", alpha=0.5), w, given))

    def error(size: float) -> float:
        algorithm = per_fedavg(objective, batch=8, mode="hf", alpha=0.5, **{form: size})  # type: ignore[arg-type]
        return float((flat(direction(algorithm, w, given)) - exact).norm())

    errors = [error(0.2 / 2**k) for k in range(4)]
    assert all(3.6 < larger / smaller < 4.4 for larger, smaller in itertools.pairwise(errors)), errors


def test_the_default_reach_is_where_the_weights_type_has_most_digits() -> None:
    double, single = elu_net(), At.of(elu_net(), 0)
    assert per_fedavg(double).hyper["delta0"] == 1e-4
    at = At(
        single.objective,
        *(
            {
                name: tensor.float() if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()
            }
            for tensors in (single.w, single.given, single.v)
        ),
    )

    def error(delta0: float) -> float:
        h = scalar(delta0, torch.float32) / norm(at.v)
        found = flat(difference_hvp(at.objective, at.w, at.given, at.v, h))
        return relative(found.double(), single.exact())

    assert error(1e-2) < 1e-3
    assert error(1e-2) < error(1e-4) < error(1e-5)


@pytest.mark.sample(6)
@pytest.mark.parametrize("delta", [1e-3, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("seed", range(4))
def test_05_the_error_stays_below_half_rho_delta_v_squared(delta: float, seed: int) -> None:
    at = At.of(logistic(FEATURES), seed)
    x = at.given["batch.0.x"]
    rho = float(x.norm(dim=1).pow(3).mean()) / (6 * math.sqrt(3))  # |sigmoid''| is at most 1 / (6 sqrt 3)

    error = float((at.central(delta) - at.exact()).norm())

    assert error < 0.5 * rho * delta * float(flat(at.v).norm()) ** 2
    undivided = float((2 * at.central(delta) - at.exact()).norm())
    assert delta > 0.01 or undivided > 0.5 * rho * delta * float(flat(at.v).norm()) ** 2


class Cubic(nn.Module):
    """|w|^3 / 6 for each entry, whose Hessian is 1-Lipschitz and no better."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) * self.w.abs().pow(3).sum() / 6


def test_05_the_bound_is_reached_at_a_kink_of_the_hessian() -> None:
    objective = Objective(sequential([("only", Cubic())]), TensorSpec((1,), torch.float64), Value())
    given = batches((torch.ones((1, 1), dtype=torch.float64), torch.zeros(1, dtype=torch.int64)))
    v = {"only.w": torch.tensor([3.0], dtype=torch.float64)}
    w = {"only.w": torch.zeros(1, dtype=torch.float64)}

    quotient = difference_hvp(objective, w, given, v, scalar(0.2))["only.w"]

    assert float(quotient) == pytest.approx(0.5 * 1.0 * 0.2 * 3.0**2, rel=1e-12)


def _variance(values: Tensor) -> float:
    return float((values - values.mean(0)).square().sum(1).mean())


def test_34_the_variance_of_a_correction_is_flat_in_delta() -> None:
    """Over all single samples as D'', for three delta: D and D' are fixed."""
    objective = logistic(FEATURES)
    w, fixed = random_weights(objective, 1), random_batch(objective, 1, 4)
    x, y = random_batch(objective, 5, 3)
    rows = [(x[i : i + 1], y[i : i + 1]) for i in range(5)]
    found = []
    for delta in (1.0, 1e-2, 1e-4):
        algorithm = per_fedavg(objective, batch=1, mode="hf", delta=delta, alpha=1.0)
        steps = [flat(direction(algorithm, w, batches(fixed, fixed, row))) for row in rows]
        found.append(_variance(torch.stack(steps)))
    assert min(found) > 0
    assert max(found) < 1.5 * min(found)


def test_the_scale_free_reach_is_divided_by_the_norm() -> None:
    """delta0 so large that the quotient shows which h it had; the net has third derivatives (per_fedavg.md 2.8)."""
    objective, alpha, delta0 = elu_net(), 0.5, 0.5
    w = random_weights(objective, 1)
    outer, inner, hessian = (random_batch(objective, 8, seed) for seed in (2, 3, 4))
    wt = shift(w, gradient(objective, w, batches(inner))[2], scalar(-alpha))
    gt = gradient(objective, wt, batches(outer))[2]

    def expected(h: float) -> Tensor:
        return flat(gt) - alpha * flat(difference_hvp(objective, w, batches(hessian), gt, scalar(h)))

    algorithm = per_fedavg(objective, batch=8, mode="hf", delta0=delta0, alpha=alpha)
    found = flat(direction(algorithm, w, batches(outer, inner, hessian)))
    assert relative(found, expected(delta0 / float(flat(gt).norm()))) < 1e-12
    assert relative(found, expected(delta0)) > 1e-4
    assert relative(found, expected(delta0 * float(flat(gt).norm()))) > 1e-4


# -- invariants 8, 9 and 14 of the Per-FedAvg spec: what a step reads and how many derivatives it takes ----


CALLS_D = 3


@dataclass(frozen=True)
class Watched(Value):
    """Notes which labels it is asked about, by their place in memory: one batch object, one place."""

    seen: list[int] = field(default_factory=list)

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        self.seen.append(y.data_ptr())
        return super().each(out, y)


def given(streams: int) -> Tensors:
    made = [
        (
            sample(positive(CALLS_D, seed), normal((CALLS_D,), seed)),
            torch.full((1,), seed % 2, dtype=torch.int64),
        )
        for seed in range(streams)
    ]
    return batches(*made)


def read(algorithm: Algorithm, loss: Watched, tensors: Tensors) -> tuple[list[int], Counts]:
    """The streams whose batches a step read, in order, and the derivatives that it took."""
    places = {y.data_ptr(): int(name.split(".")[1]) for name, y in tensors.items() if name.endswith(".y")}
    loss.seen.clear()
    with count_derivatives() as counts:
        stepped(algorithm, {"only.w": normal((CALLS_D,), 9)}, tensors)
    return [places[place] for place in loss.seen], counts


@pytest.mark.parametrize(
    ("options", "streams", "gradients", "products"),
    [
        ({"mode": "fo"}, [1, 0], 2, 0),
        ({"mode": "hf"}, [1, 0, 2, 2], 4, 0),
        ({"mode": "hf", "hessian_batch": "inner"}, [1, 0, 1, 1], 4, 0),
        ({"mode": "exact"}, [1, 0, 2], 2, 1),
        ({"mode": "exact", "hessian_batch": "inner"}, [1, 0, 1], 2, 1),
        ({"mode": "fo", "inner_steps": 2}, [1, 3, 0], 3, 0),
        ({"mode": "hf", "inner_steps": 2}, [1, 3, 0, 4, 4, 2, 2], 7, 0),
        ({"mode": "exact", "inner_steps": 2}, [1, 3, 0, 4, 2], 3, 2),
    ],
)
def test_08_09_a_step_reads_these_batches_and_takes_these_derivatives(
    options: dict[str, Any], streams: list[int], gradients: int, products: int
) -> None:
    loss = Watched()
    algorithm = per_fedavg(quadratic(CALLS_D, loss), batch=1, **options)

    found, counts = read(algorithm, loss, given(5))

    assert found == streams
    assert (counts.gradients, counts.products) == (gradients, products)


def test_the_streams_of_a_step_are_drawn_independently_of_each_other() -> None:
    """Rows of D', D and D'' differ, in every step, and none repeats what another stream had a step before."""
    numbered = torch.arange(500, dtype=torch.float64).reshape(-1, 1, 1).expand(-1, CALLS_D, CALLS_D + 1)
    client = Client(2, numbered, torch.zeros(500, dtype=torch.int64))
    algorithm = per_fedavg(quadratic(CALLS_D), batch=20, mode="hf")
    step = algorithm.phases[0].function
    feed = drawn(algorithm, client, 0, 1)
    rows = {
        (at, stream): tuple(feed(step, at)[f"batch.{stream}.x"][:, 0, 0].tolist())
        for at in range(3)
        for stream in range(3)
    }
    assert all(len(set(each)) == 20 for each in rows.values())
    shared = [len(set(a) & set(b)) for a, b in itertools.combinations(rows.values(), 2)]
    assert max(shared) < 8


def test_08_fedavg_takes_one_gradient() -> None:
    loss = Watched()
    algorithm = fedavg_update(quadratic(CALLS_D, loss), batch=1)
    found, counts = read(algorithm, loss, given(1))
    assert (found, counts.gradients, counts.products) == ([0], 1, 0)


@pytest.mark.parametrize(
    ("options", "streams"),
    [
        ({"mode": "fo"}, {0, 1}),
        ({"mode": "fo", "inner_steps": 3}, {0, 1, 3, 5}),
        ({"mode": "exact", "hessian_batch": "inner"}, {0, 1}),
        ({"mode": "hf"}, {0, 1, 2}),
        ({"mode": "hf", "inner_steps": 2}, {0, 1, 2, 3, 4}),
    ],
)
def test_08_a_step_asks_for_no_other_batches(options: dict[str, Any], streams: set[int]) -> None:
    inputs = per_fedavg(quadratic(CALLS_D), **options).phases[0].function.inputs
    assert {int(name.split(".")[1]) for name in inputs if name.startswith("batch.")} == streams


MODES: list[dict[str, Any]] = [
    {"mode": "fo"},
    {"mode": "exact"},
    {"mode": "exact", "hessian_batch": "inner"},
    {"mode": "hf"},
    {"mode": "hf", "delta": 1e-2},
    {"mode": "hf", "inner_steps": 2},
]


def trajectory(
    algorithm: Algorithm, weights: Tensors, clients: list[Client], **options: Any
) -> list[Tensors]:
    return [
        done.weights
        for done in federated(algorithm, weights, clients, rounds=3, seed=5, fraction=0.5, **options)
    ]


def same(ours: list[Tensors], theirs: list[Tensors]) -> bool:
    return all(
        torch.equal(mine[name], other[name])
        for mine, other in zip(ours, theirs, strict=True)
        for name in other
    )


def plain(objective: Objective, batch: int, steps: int) -> Algorithm:
    return sgd(objective, batch=batch, steps=steps, lr=0.05, momentum=0.0, weight_decay=0.0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", MODES)
def test_14_without_alpha_every_mode_is_fedavg_on_quadratics(options: dict[str, Any]) -> None:
    objective = quadratic(CALLS_D)
    clients = [user(number, positive(CALLS_D, number), normal((CALLS_D,), number)) for number in range(4)]
    algorithm = per_fedavg(objective, batch=1, steps=3, lr=0.05, alpha=0.0, **options)
    weights = {"only.w": normal((CALLS_D,), 7)}
    assert same(trajectory(algorithm, weights, clients), trajectory(plain(objective, 1, 3), weights, clients))
    adapting = trajectory(algorithm, weights, clients, hyper={"alpha": 0.1})
    assert not same(adapting, trajectory(plain(objective, 1, 3), weights, clients))


@pytest.mark.parametrize(
    ("model", "options"),
    mostly_slow(zip(("cnn", "resnet8") * 3, MODES, strict=True), [("cnn", MODES[2]), ("resnet8", MODES[3])]),
)
def test_14_without_alpha_every_mode_is_fedavg_on_networks(model: str, options: dict[str, Any]) -> None:
    """Mini-batches, float32, moving statistics included."""
    spec = tiny(model)
    objective = Objective.of(OutputSide(spec, 0))
    clients = [Client(number, *samples(spec, 9, seed=number)) for number in range(2)]
    algorithm = per_fedavg(objective, batch=4, steps=2, lr=0.05, alpha=0.0, **options)
    weights = dict(spec.weights)
    assert same(trajectory(algorithm, weights, clients), trajectory(plain(objective, 4, 2), weights, clients))


def test_moving_statistics_are_those_of_the_outer_pass() -> None:
    spec = tiny("resnet8")
    objective = Objective.of(OutputSide(spec, 0))
    names = {name: TensorSpec.of(tensor) for name, tensor in spec.weights.items()}
    x, y = samples(spec, 12)
    streams = batches(*((x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)))
    algorithm = per_fedavg(objective, batch=4, mode="hf", alpha=0.0)
    step = algorithm.phases[0].function

    def after(tensors: Tensors) -> Tensors:
        state = {f"state.weights.{name}": spec.weights[name] for name in names}
        scalars = {f"hyper.{name}": torch.tensor(value) for name, value in algorithm.hyper.items()}
        out = step({name: (state | scalars | tensors)[name] for name in step.inputs})
        return {name: out[f"state.weights.{name}"] for name in objective.buffers}

    plainly = plain(objective, 4, 1).phases[0].function
    state = {f"state.weights.{name}": spec.weights[name] for name in names}
    expected = plainly({**state, **batches((x[:4], y[:4])), "hyper.lr": torch.tensor(0.0)})

    assert all(
        torch.equal(value, expected[f"state.weights.{name}"]) for name, value in after(streams).items()
    )
    assert objective.buffers


# -- invariant 32 of the Per-FedAvg spec: the bias of G, as its exact mean over every draw of small batches --


BIAS_D = 3


def rows(data: Batch, chosen: Sequence[int]) -> Batch:
    x, y = data
    return x[list(chosen)], y[list(chosen)]


def mean_direction(algorithm: Algorithm, w: Tensors, draws: Iterable[tuple[Batch, ...]]) -> Tensor:
    return torch.stack([flat(direction(algorithm, w, batches(*given))) for given in draws]).mean(0)


def noisy_user(count: int, *, curved: bool) -> tuple[Batch, Tensor, Tensor]:
    """Samples whose b differ, and whose A do too where ``curved``; the mean A and b."""
    matrices = [positive(BIAS_D, k if curved else 0) for k in range(count)]
    vectors = [normal((BIAS_D,), 20 + k) for k in range(count)]
    x = torch.cat([sample(a, b) for a, b in zip(matrices, vectors, strict=True)])
    return (
        (x, torch.zeros(count, dtype=torch.int64)),
        torch.stack(matrices).mean(0),
        torch.stack(vectors).mean(0),
    )


def bias_on_a_quadratic(*, curved: bool, hessian_batch: str) -> float:
    data, a, b = noisy_user(4, curved=curved)
    w = normal((BIAS_D,), 3)
    algorithm = per_fedavg(quadratic(BIAS_D), batch=1, mode="exact", alpha=ALPHA, hessian_batch=hessian_batch)
    draws = (tuple(rows(data, [k]) for k in ks) for ks in itertools.product(range(4), repeat=3))
    factor = torch.eye(BIAS_D, dtype=torch.float64) - ALPHA * a
    return float((mean_direction(algorithm, {NAME: w}, draws) - factor @ factor @ (a @ w - b)).norm())


@pytest.mark.parametrize("curved", [False, True])
def test_32_exact_is_unbiased_on_a_quadratic(curved: bool) -> None:
    assert bias_on_a_quadratic(curved=curved, hessian_batch="independent") < 1e-12


def test_32_a_batch_that_serves_twice_biases_it_once_curvature_is_noisy() -> None:
    assert bias_on_a_quadratic(curved=False, hessian_batch="inner") < 1e-12
    assert bias_on_a_quadratic(curved=True, hessian_batch="inner") > 1e-4


def test_32_on_logistic_users_the_bias_shrinks_with_the_batch() -> None:
    objective, count = logistic(BIAS_D), 4
    data, w = random_batch(objective, count, 1), random_weights(objective, 2, 1.5)
    noise = torch.stack([flat(gradient(objective, w, batches(rows(data, [k])))[2]) for k in range(count)])
    sigma = float((noise - noise.mean(0)).square().sum(1).mean().sqrt())
    smooth = 0.25 * float(data[0].square().sum(1).max())
    alpha = min(ALPHA, 1 / smooth)

    exact = per_fedavg(objective, batch=count, mode="exact", alpha=alpha)
    expected = flat(direction(exact, w, batches(data, data, data)))
    biases = {}
    for size in (1, 2, 3):
        algorithm = per_fedavg(objective, batch=count, inner_batch=size, mode="exact", alpha=alpha)
        draws = ((data, rows(data, ks), data) for ks in itertools.product(range(count), repeat=size))
        biases[size] = float((mean_direction(algorithm, w, draws) - expected).norm())

    assert all(bias <= 2 * alpha * smooth * sigma / size**0.5 for size, bias in biases.items())
    assert biases[1] > 1e-6
    assert biases[2] < 0.6 * biases[1]
    assert biases[3] < 0.45 * biases[1]
