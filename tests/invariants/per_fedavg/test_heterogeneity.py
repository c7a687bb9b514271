"""Per-FedAvg invariants 29 and 30, and the other diagnostics of per_fedavg.md 6.6 where their values are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl.analysis.heterogeneity.curvature import (
    AdaptationAccumulator,
    ExaminedUser,
    GradientAccumulator,
    GradientDissimilarity,
    adapt_user,
    curvature_report,
    extremes,
    hessian_variance,
    user_gradient,
)
from edgefl.analysis.heterogeneity.labels import feature_report, label_report, majority_levels, wasserstein_1d
from edgefl.analysis.heterogeneity.losses import FlatLoss, Shard, ShardBatch, batches
from edgefl.analysis.heterogeneity.report import reading
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import TensorSpec
from edgefl.data.groups import counts_of
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.invariants.fafed.quadratic import elu_net, logistic, normal, positive
from tests.invariants.per_fedavg.heterogeneity import (
    largest_norms,
    losses_at,
    quadratic_losses,
    quadratic_users,
    sharing_inputs,
)
from tests.rings.rows import mostly_slow
from tests.support.errors import DataError, refuses

D = 3
SMALL = {
    "resnet8": {"size": 8, "widths": (4, 4, 4)},
    "lstm_lm": {"length": 4, "vocabulary": 12, "features": 5, "hidden": 4},
    "reproduce.fafed.models:fafed_mnist": {"size": 16},
    "vit": {"size": 8, "width": 12, "depth": 1},
}


def gradients_of(losses: FlatLoss, shards: list[Shard]) -> GradientDissimilarity:
    made = GradientAccumulator()
    for user, shard in enumerate(shards):
        made.add(user_gradient(losses, losses.start, batches(shard, user)))
    return made.report()


@pytest.mark.parametrize(
    ("single_class", "p", "half_a", "half_b", "square", "pairwise", "levels"),
    [
        (False, (0.12, 0.08), 0.4, 0.8, 0.40, 0.6, (0.5, 0.4)),
        (True, (0.1, 0.1), 0.5, 0.9, 0.53, 0.7, (0.6, 3 / 7)),
    ],
)
def test_29_label_distances_of_the_paper_s_partitions(
    single_class: bool,
    p: tuple[float, float],
    half_a: float,
    half_b: float,
    square: float,
    pairwise: float,
    levels: tuple[float, float],
) -> None:
    counts = counts_of(50, 196, single_class=single_class)
    found = label_report(counts)
    assert np.allclose(found.p, np.repeat(p, 5), atol=1e-12)
    assert np.allclose(found.tv, np.repeat((half_a, half_b), 25), atol=1e-12)
    assert found.mean_tv2 == pytest.approx(square, abs=1e-12)
    assert found.mean_pairwise == pytest.approx(pairwise, abs=1e-12)
    assert majority_levels(counts) == pytest.approx(levels, abs=1e-12)


def test_29_users_weigh_the_same_however_many_samples_they_have() -> None:
    found = label_report(np.array([[1, 1], [300, 100]]))
    assert np.allclose(found.p, [0.625, 0.375]) and np.allclose(found.tv, [0.125, 0.125])


def test_29_identical_users_are_at_no_distance() -> None:
    found = label_report(np.tile([3, 0, 4], (6, 1)))
    assert max(found.tv.max(), found.pairwise.max(), found.ordered_w1.max()) < 1e-15
    with pytest.raises(DataError, match="1 of them without"):
        label_report(np.array([[1, 2], [0, 0]]))


def test_29_w1_between_labels_equals_tv_for_the_0_1_metric() -> None:
    from scipy.stats import wasserstein_distance

    counts = np.random.default_rng(0).integers(0, 9, (4, 6)) + np.eye(4, 6, dtype=int)
    found = label_report(counts)
    for user, row in enumerate(found.frequencies):
        assert found.ordered_w1[user] == pytest.approx(
            wasserstein_distance(range(6), range(6), row, found.p), abs=1e-12
        )
        # Moving mass costs 1 wherever it goes: what a user has too much of has to leave.
        assert found.tv[user] == pytest.approx(np.maximum(row - found.p, 0).sum(), abs=1e-12)


def test_30_identical_users_have_no_dissimilarity_of_any_kind() -> None:
    losses = losses_at(elu_net(), 1)
    shard = Shard(normal((12, 5), 4), torch.arange(12) % 3)
    found = gradients_of(losses, [shard] * 5)
    assert found.plug_in == 0.0 and found.unbiased == 0.0 and found.mean_norm2 > 0.0
    examined = [
        ExaminedUser(user, shard, losses.gradient(losses.start, ShardBatch(0, *shard))) for user in range(2)
    ]
    assert curvature_report(losses, examined, 0.0).gamma_h2 < 1e-20


@pytest.mark.parametrize("seed", mostly_slow([0, 1], [0]))
def test_30_label_distances_bound_dissimilarity(seed: int) -> None:
    shares = ((4, 1, 0), (0, 2, 1), (1, 0, 3))
    losses, shards = losses_at(elu_net(2, 2), seed), sharing_inputs(shares, 2, 2, seed)
    B, L = largest_norms(losses, sharing_inputs(((1, 1, 1),), 2, 2, seed))
    squares = label_report(np.array(shares)).mean_tv2
    found = gradients_of(losses, shards)
    assert 0 < found.plug_in <= 4 * B**2 * squares
    users = [ExaminedUser(n, shard, losses.start) for n, shard in enumerate(shards)]
    hessians = curvature_report(losses, users, 0.0)
    assert 0 < hessians.gamma_h2 <= 4 * L**2 * squares
    # The inputs in place of the classes' proportions: then labels say nothing, and the bound does not hold.
    moved = [shards[0]._replace(x=shards[0].x + 5.0 * user) for user in range(3)]
    assert gradients_of(losses, moved).plug_in > 0.0 == label_report(np.ones((3, 3))).mean_tv2


def test_30_split_halves_are_unbiased_for_alike_users() -> None:
    losses, found = losses_at(logistic(D), 2), []
    for draw in range(40):
        generator = torch.Generator().manual_seed(draw)
        shards = []
        for _ in range(4):
            x = normal((8, D), generator)
            shards.append(Shard(x, (x[:, :1] + normal((8, 1), generator) > 0).double()))
        found.append(gradients_of(losses, shards))
    unbiased, plug_in, floor = (
        np.array([getattr(one, name) for one in found]) for name in ("unbiased", "plug_in", "noise_floor")
    )
    error = unbiased.std() / len(found) ** 0.5
    assert abs(unbiased.mean()) < 3 * error
    assert plug_in.mean() > 5 * error and plug_in.min() > 0
    assert abs((plug_in - floor).mean()) < 3 * (plug_in - floor).std() / len(found) ** 0.5


def test_30_dissimilarity_is_the_mean_square_of_the_differences() -> None:
    w = normal((D,), 5)
    matrices, offsets = [positive(D, n) for n in range(4)], [normal((D,), 20 + n) for n in range(4)]
    found = gradients_of(quadratic_losses(w), quadratic_users(matrices, offsets))
    own = torch.stack([a @ w - b for a, b in zip(matrices, offsets, strict=True)])
    expected = float((own - own.mean(0)).square().sum(1).mean())
    assert found.plug_in == pytest.approx(expected, rel=1e-12)
    assert found.unbiased == pytest.approx(expected, rel=1e-12), "without noise the halves agree"
    assert found.noise_floor == pytest.approx(0.0, abs=1e-12)
    assert found.ratio == pytest.approx(expected / float(own.mean(0).square().sum()), rel=1e-12)
    assert found.norms == pytest.approx(own.norm(dim=1).tolist(), rel=1e-12)


def test_the_variance_of_single_samples_is_exact() -> None:
    losses = losses_at(logistic(D), 0)
    x = normal((24, D), 3)
    y = (x[:, :1] > 0.3).double()

    def variance(order: Tensor, size: int) -> float:
        parts = [ShardBatch(n, x[rows], y[rows]) for n, rows in enumerate(order.split(size))]
        return user_gradient(losses, losses.start, parts).variance

    single = [losses.gradient(losses.start, ShardBatch(0, x[n : n + 1], y[n : n + 1])) for n in range(24)]
    rows = torch.stack(single)
    exact = float((rows - rows.mean(0)).square().sum() / 23)
    assert variance(torch.arange(24), 1) == pytest.approx(exact, rel=1e-12)
    orders = [torch.randperm(24, generator=torch.Generator().manual_seed(n)) for n in range(30)]
    found = np.array([variance(order, 6) for order in orders])
    assert abs(found.mean() - exact) < 3 * found.std() / 30**0.5


def test_kappa_and_meta_gradients_on_quadratics_are_those_of_the_formulas() -> None:
    alpha, w = 0.3, normal((D,), 5)
    matrices, offsets = [positive(D, n) for n in range(3)], [normal((D,), 20 + n) for n in range(3)]
    losses, made, metas = quadratic_losses(w), AdaptationAccumulator(), []
    for user, (shard, a, b) in enumerate(
        zip(quadratic_users(matrices, offsets), matrices, offsets, strict=True)
    ):
        parts = batches(shard, user)
        found = adapt_user(losses, user_gradient(losses, losses.start, parts).mean, parts, alpha)
        inner = torch.eye(D, dtype=torch.float64) - alpha * a
        outer = inner @ (a @ w - b)
        metas.append(inner @ outer)
        assert found.kappa == pytest.approx(float(alpha * (a @ outer).norm() / outer.norm()), rel=1e-10)
        assert torch.allclose(found.meta, metas[-1], rtol=0, atol=1e-12)
        made.add(found)
    stacked = torch.stack(metas)
    expected = float((stacked - stacked.mean(0)).square().sum(1).mean())
    assert made.report().gamma_f2 == pytest.approx(expected, rel=1e-10)


def test_curvature_on_quadratics_is_that_of_the_matrices() -> None:
    matrices, offsets = [positive(D, n) for n in range(3)], [normal((D,), 20 + n) for n in range(3)]
    losses = quadratic_losses(normal((D,), 5))
    users = [
        ExaminedUser(n, shard, losses.gradient(losses.start, ShardBatch(0, *shard)))
        for n, shard in enumerate(quadratic_users(matrices, offsets))
    ]
    found = curvature_report(losses, users, 0.2)
    mean = torch.stack(matrices).mean(0)
    apart = [float(torch.linalg.matrix_norm(a - mean, 2)) ** 2 for a in matrices]
    assert found.gamma_h2 == pytest.approx(sum(apart) / 3, rel=1e-10)
    for a, pair in zip(matrices, found.eigenvalues, strict=True):
        values = torch.linalg.eigvalsh(a)
        assert pair == pytest.approx((float(values[0]), float(values[-1])), rel=1e-10)
    assert found.largest == pytest.approx(
        max(float(torch.linalg.matrix_norm(a, 2)) for a in matrices), rel=1e-10
    )
    assert found.rho < 1e-12 and found.sigma_h2 < 1e-20


def test_the_variance_of_diagonal_hessians_is_exact() -> None:
    losses = quadratic_losses(normal((D,), 5))
    diagonals = normal((6, D), 8)
    x = torch.cat([torch.cat((torch.diag(row), row[:, None]), 1)[None] for row in diagonals])
    parts = [ShardBatch(n, x[n : n + 1], torch.zeros(1, dtype=torch.int64)) for n in range(6)]
    exact = float((diagonals - diagonals.mean(0)).square().sum() / 5)
    assert hessian_variance(losses, parts) == pytest.approx(exact, rel=1e-10)


def test_lanczos_finds_both_ends_of_a_spectrum_larger_than_its_steps() -> None:
    values = torch.cat([torch.tensor([-3.0, 7.0]), torch.linspace(-1, 1, 400)]).double()
    low, high = extremes(lambda v: values * v, values)
    assert (low, high) == pytest.approx((-3.0, 7.0), rel=1e-6)
    assert extremes(lambda v: 0 * v, values) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("kappa", "alpha_lambda", "told"),
    [(0.04, 0.1, "coincide"), (0.1, 0.2, "little"), (0.5, 0.9, "visibly"), (0.9, 0.95, "drops most")],
)
def test_kappa_is_read_as_the_spec_says(kappa: float, alpha_lambda: float, told: str) -> None:
    assert told in reading(kappa, alpha_lambda) and "unsafe" not in reading(kappa, alpha_lambda)
    assert reading(kappa, 1.5).startswith("FO unsafe: alpha * lambda_max = 1.5 > 1")


def test_w1_of_a_feature_is_exact_for_users_of_unequal_size() -> None:
    from scipy.stats import wasserstein_distance

    rng = np.random.default_rng(0)
    values, owner = rng.normal(size=(30, 2)), np.repeat([0, 1, 2], [5, 10, 15])
    mixture = (1 / np.bincount(owner))[owner]
    found = wasserstein_1d(values, owner)
    for user in range(3):
        for column in range(2):
            mine = values[owner == user, column]
            expected = wasserstein_distance(mine, values[:, column], None, mixture)
            assert found[user, column] == pytest.approx(expected, rel=1e-10)


def test_distances_of_inputs_stand_out_of_chance_only_where_users_differ() -> None:
    rng = np.random.default_rng(1)
    alike = feature_report([rng.normal(size=(60, 20)) for _ in range(6)])
    apart = feature_report([rng.normal(size=(60, 20)) + 2.0 * (user % 2) for user in range(6)])
    for name in ("per_feature", "sliced", "matched"):
        found, chance = getattr(alike.found, name).mean(), getattr(alike.chance, name).mean()
        assert 0 < found == pytest.approx(chance, rel=0.15)
        assert getattr(apart.found, name).mean() > 1.1 * getattr(apart.chance, name).mean()
    assert np.all(apart.found.sliced <= apart.found.matched), "a lower bound, and an upper one"


def test_a_user_with_one_sample_is_named() -> None:
    with refuses(DataError, user=3):
        batches(Shard(torch.zeros(1, 2), torch.zeros(1)), 3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["resnet8", "lstm_lm", "reproduce.fafed.models:fafed_mnist", "vit"])
def test_hessians_of_models_are_symmetric(name: str) -> None:
    spec = build_model(name, **SMALL[name])
    losses = FlatLoss(Objective.of(OutputSide(spec, 0)), spec.weights)
    x = TensorSpec(spec.sample.shape, spec.sample.dtype, spec.sample.below).rows(4)
    inputs = Function("", lambda given: given, {"batch.x": x, "batch.y": spec.label.rows(4)}).example(0)
    batch = ShardBatch(3, inputs["batch.x"], inputs["batch.y"])
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn((2, len(losses.start)), generator=generator)
    left, right = (float(a @ losses.product(losses.start, b, batch)) for a, b in ((u, v), (v, u)))
    assert left == pytest.approx(right, rel=0.02 if name == "lstm_lm" else 1e-3) and left != 0.0
