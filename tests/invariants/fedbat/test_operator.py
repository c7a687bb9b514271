"""FedBAT's operator, its derivatives and its step sizes: invariants 1 to 14 of fedbat.md, section 7."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from edgefl.codecs.binarize import EPS, LIMIT, StepSize, StepSizeGroups, draw, is_inside, slope
from edgefl.codecs.codec import Change
from edgefl.codecs.coders import code_signs
from tests.invariants.fedbat.tiny import algorithm_of, floor_form, golden_spec, other_tail, step

LARGEST_ZETA = 1 - 2.0**-24
ALPHAS = st.floats(1e-8, 1e4)
ZETAS = st.floats(0, LARGEST_ZETA)
ONE = torch.ones(())


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def sample(law: str, count: int = 400_000) -> Tensor:
    """Numbers of a law with mean 0, at evenly spaced quantiles."""
    u = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    match law:
        case "gaussian":
            x = math.sqrt(2) * torch.erfinv(2 * u - 1)
        case "laplace":
            x = -torch.sign(u - 0.5) * torch.log1p(-2 * (u - 0.5).abs())
        case _:
            x = 2 * u - 1
    return x.float()


# -- the operator ----------------------------------------------------------------------------------------------


@given(alpha=ALPHAS, zeta=ZETAS, share=st.one_of(st.floats(-2, 2), st.sampled_from([0.0, 1.0, -1.0])))
def test_i1_every_sign_is_plus_or_minus_one(alpha: float, zeta: float, share: float) -> None:
    x = scalar(share) * scalar(alpha)
    assert float(draw(x, scalar(alpha), scalar(zeta))) in (-1.0, 1.0)


@pytest.mark.parametrize("x", [0.0, 1.0, -1.0, math.inf, -math.inf])
@pytest.mark.parametrize("zeta", [0.0, 0.5, LARGEST_ZETA])
def test_i1_the_ends_are_never_zero_nor_three_times_alpha(x: float, zeta: float) -> None:
    sign = float(draw(scalar(x), ONE, scalar(zeta)))
    assert sign == (math.copysign(1, x) if x else (1.0 if zeta < 0.5 else -1.0))


@pytest.mark.parametrize("x", [-1.0, -0.7, -0.1, 0.0, 0.35, 0.9, 1.0])
def test_i2_inside_the_mean_of_many_draws_is_x(x: float) -> None:
    alpha, count = 0.02, 200_000
    drawn = alpha * draw(torch.full((count,), alpha * x), scalar(alpha), uniform(count)).double()
    assert abs(float(drawn.mean()) - alpha * x) < 5 * alpha / math.sqrt(count)


@pytest.mark.parametrize("x", [1.001, 3.0, -1.001, -50.0])
def test_i2_outside_the_sign_is_certain(x: float) -> None:
    assert bool((draw(torch.full((10_000,), x), ONE, uniform(10_000)) == math.copysign(1, x)).all())


@pytest.mark.parametrize("x", [-1.0, -0.6, 0.0, 0.4, 1.0])
def test_i3_the_variance_is_alpha_squared_minus_x_squared(x: float) -> None:
    alpha, count = 0.5, 200_000
    drawn = alpha * draw(torch.full((count,), alpha * x), scalar(alpha), uniform(count)).double()
    expected = alpha**2 * (1 - x**2)
    assert abs(float(drawn.var(correction=0)) - expected) <= 5 * alpha**2 / math.sqrt(count) * (expected > 0)


def test_i4_plus_has_probability_alpha_plus_x_over_two_alpha() -> None:
    alpha, count = 0.3, 20_000
    grid = torch.linspace(-0.95, 0.95, 39)
    plus = (
        (draw(alpha * grid[:, None].expand(-1, count), scalar(alpha), uniform(39, count)) > 0).sum(1).double()
    )
    p = (1 + grid.double()) / 2
    chi_square = float(((plus - count * p).square() / (count * p * (1 - p))).sum())
    assert 12 < chi_square < 80  # 39 degrees of freedom: one in a million either side


def test_i5_the_law_is_odd() -> None:
    x, zeta = 0.8 * (2 * uniform(50_000, seed=1) - 1), uniform(50_000, seed=2)
    # -S(x) at zeta is S(-x) at the other tail, which is as likely.
    differ = draw(-x, ONE, other_tail(zeta)) != -draw(x, ONE, zeta)
    assert int(differ.sum()) <= 2  # where zeta is the threshold to the last bit


@given(x=st.floats(-2, 2), zeta=ZETAS, power=st.integers(-20, 20))
def test_i5_scaling_x_and_alpha_scales_s(x: float, zeta: float, power: int) -> None:
    c = 2.0**power  # exact, so that no threshold moves by rounding
    assert draw(scalar(c * x), scalar(c), scalar(zeta)) == draw(scalar(x), ONE, scalar(zeta))


def test_i6_with_the_largest_as_alpha_nothing_is_clipped() -> None:
    m = torch.randn(2000, generator=torch.Generator().manual_seed(3))
    alpha = m.abs().max()
    assert bool(is_inside(m, alpha).all())
    drawn = alpha * draw(m.expand(500, -1), alpha, uniform(500, 2000))
    error = float((drawn - m).double().square().sum(1).mean())
    expected = float(m.numel() * alpha.square() - m.square().sum())
    assert error == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("law", "stochastic", "nearest", "bias", "clipped"),
    [
        ("gaussian", 0.487, 0.363, 0.233, 0.425),
        ("laplace", 0.604, 0.500, 0.368, 0.368),
        ("uniform", 0.375, 0.250, 0.125, 0.500),
    ],
)
def test_i7_errors_at_mean_size_are_the_published_ones(
    law: str, stochastic: float, nearest: float, bias: float, clipped: float
) -> None:
    m = sample(law)
    alpha, energy = m.abs().mean(), m.double().square().sum()
    out = ~is_inside(m, alpha)
    share = {
        "stochastic": (alpha * draw(m, alpha, uniform(len(m))) - m).double().square().sum() / energy,
        "nearest": (alpha * (2 * code_signs(Change(m, m), "plus") - 1) - m).double().square().sum() / energy,
        "bias": torch.where(out, m.abs() - alpha, 0.0).double().square().sum() / energy,
        "clipped": out.double().mean(),
    }
    # The Gaussian's bias is 0.2324, printed as 0.233.
    within = {"stochastic": 0.003, "nearest": 0.0006, "bias": 0.0007, "clipped": 0.0006}
    expected = {"stochastic": stochastic, "nearest": nearest, "bias": bias, "clipped": clipped}
    assert {name: float(value) for name, value in share.items()} == {
        name: pytest.approx(expected[name], abs=within[name]) for name in share
    }


def test_i7_the_error_is_variance_inside_and_bias_outside() -> None:
    m, alpha = sample("gaussian", 3000), scalar(0.8)
    drawn = alpha * draw(m.expand(500, -1), alpha, uniform(500, 3000, seed=5))
    within = is_inside(m, alpha)
    expected = torch.where(within, alpha.square() - m.square(), (m.abs() - alpha).square()).double().sum()
    assert float((drawn - m).double().square().sum(1).mean()) == pytest.approx(float(expected), rel=0.01)


# -- its derivatives -------------------------------------------------------------------------------------------


def test_i8_dx_is_one_up_to_alpha_and_zero_beyond() -> None:
    x = torch.tensor([0.0, 0.5, -0.5, 1.0, -1.0, 1.0 + 2**-23, -1.0 - 2**-23, 9.0])
    assert is_inside(x, ONE).tolist() == [True] * 5 + [False] * 3


@given(x=st.floats(-3, 3), alpha=st.floats(0.25, 2), zeta=ZETAS)
def test_i8_dalpha_is_the_formula_of_its_three_cases(x: float, alpha: float, zeta: float) -> None:
    x, alpha = float(scalar(x)), float(scalar(alpha))
    sign = draw(scalar(x), scalar(alpha), scalar(zeta))
    found = float(slope(scalar(x), scalar(alpha), sign))
    floor = (float(sign) + 1) / 2
    expected = 2 * floor - (x + alpha) / alpha if abs(x) <= alpha else math.copysign(1, x)
    assert found == pytest.approx(expected, abs=1e-6)
    if abs(x) <= alpha:
        assert found == pytest.approx((float(sign) * alpha - x) / alpha, abs=1e-6)


@pytest.mark.parametrize("x", [-0.9, -0.2, 0.0, 0.5, 1.0])
def test_i9_inside_dalpha_has_mean_zero_and_lies_within_two(x: float) -> None:
    m, count = torch.full((200_000,), x), 200_000
    found = slope(m, ONE, draw(m, ONE, uniform(count)))
    assert abs(float(found.double().mean())) < 5 / math.sqrt(count)
    assert -2 <= float(found.min()) <= float(found.max()) <= 2


@pytest.mark.parametrize("x", [1.5, -1.5])
def test_i9_outside_dalpha_is_the_sign(x: float) -> None:
    m = torch.full((1000,), x)
    assert bool((slope(m, ONE, draw(m, ONE, uniform(1000))) == math.copysign(1, x)).all())


def test_i10_both_derivatives_are_those_of_autograd() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5000, generator=generator, dtype=torch.float64).requires_grad_()
    zeta = torch.rand(5000, generator=generator, dtype=torch.float64)
    alpha = torch.tensor(0.9, dtype=torch.float64)
    each = alpha.expand(5000).clone().requires_grad_()
    s = floor_form(x, each, zeta)
    dx, dalpha = torch.autograd.grad(s.sum(), [x, each])

    sign = draw(x.detach(), alpha, other_tail(zeta)).double()

    assert torch.equal(alpha * sign, s.detach())
    assert float((is_inside(x.detach(), alpha).double() - dx).abs().max()) <= 1e-12
    assert float((slope(x.detach(), alpha, sign) - dalpha).abs().max()) <= 1e-12
    another = draw(x.detach(), alpha, zeta).double()
    assert float((slope(x.detach(), alpha, another) - dalpha).abs().max()) > 1  # the draw is shared


# -- step sizes ------------------------------------------------------------------------------------------------


def test_i11_the_gradient_of_alpha_e_is_rho_alpha_times_the_sum() -> None:
    size, scale, e = StepSize(6.0), torch.tensor([0.5, 2e-3]), torch.tensor([0.1, -0.3])
    alpha, pull = size.of(scale, e), torch.tensor([0.7, -40.0])
    moved, held_back = size.descend(scale, e, alpha, pull, scalar(0.1))
    assert torch.allclose(alpha, scale * torch.exp(6 * e), rtol=1e-6)
    assert torch.allclose(moved, e - 0.1 * 6 * alpha * pull, rtol=1e-6)
    assert held_back == 0


def test_i11_without_rho_alpha_stays_to_the_last_bit() -> None:
    size, scale, e = StepSize(0.0), torch.tensor([0.123, 4e-5]), torch.zeros(2)
    for _ in range(5):
        e, _ = size.descend(scale, e, size.of(scale, e), torch.tensor([1e3, -7.0]), scalar(0.1))
        assert torch.equal(size.of(scale, e), scale)


@given(scale=st.floats(0, 100), e=st.floats(-1e30, 1e30))
def test_i11_alpha_is_above_zero_and_finite_for_any_alpha_e(scale: float, e: float) -> None:
    assert 0 < float(StepSize(6.0).of(scalar(scale), scalar(e))) < math.inf


@given(pull=st.floats(-1, 1), e=st.floats(-0.5, 0.5))
def test_i12_a_step_moves_log_alpha_by_rho_squared(pull: float, e: float) -> None:
    size, scale, rho, lr = StepSize(6.0), torch.tensor([0.5]), 6.0, 0.1
    old = size.of(scale, torch.tensor([e]))
    moved, _ = size.descend(scale, torch.tensor([e]), old, torch.tensor([pull]), scalar(lr))
    found = math.log(float(size.of(scale, moved)) / float(old))
    wanted = -lr * rho**2 * float(old) * pull
    if abs(rho * float(moved)) < LIMIT - 1e-3:
        assert found == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize(
    ("x", "zeta", "s", "dx", "dalpha"),
    [
        (0.3, 0.4, 1, 1, 0.7),
        (0.3, 0.2, -1, 1, -1.3),
        (1.2, 0.5, 1, 0, 1),
        (-1.2, 0.5, -1, 0, -1),
        (1.0, 0.5, 1, 1, 0),
    ],
)
def test_i13_golden_operator(x: float, zeta: float, s: float, dx: float, dalpha: float) -> None:
    assert float(floor_form(scalar(x), ONE, scalar(zeta))) == s  # as printed
    sign = draw(scalar(x), ONE, other_tail(scalar(zeta)))
    assert float(sign) == s
    assert float(is_inside(scalar(x), ONE)) == dx
    assert float(slope(scalar(x), ONE, sign)) == pytest.approx(dalpha, abs=1e-6)


def test_i14_golden_step() -> None:
    algorithm = algorithm_of(golden_spec(), batch=1, steps=2)
    state = {
        "weights.only.weight": torch.zeros(1, 1),
        "change.only.weight": torch.full((1, 1), 0.3),
        "scale": torch.tensor([0.5]),
        "log_scale": torch.zeros(1),
    }
    given = {
        "batch.0.x": torch.ones(1, 1),
        "batch.0.y": torch.ones(1, 1),
        "hyper.lr": scalar(0.1),
        "hyper.rho": scalar(6.0),
    }
    binarize = algorithm.phases[1].function
    new = step(binarize, state, given | {"noise.only.weight": torch.full((1, 1), 0.1)})
    assert float(new["change.only.weight"]) == pytest.approx(0.35, abs=1e-7)
    assert float(new["log_scale"]) == pytest.approx(0.06, abs=1e-7)
    assert float(StepSize(6.0).of(new["scale"], new["log_scale"])) == pytest.approx(0.7166647, abs=1e-7)


# -- where alpha has nothing to hold on to ---------------------------------------------------------------------


def test_alpha_of_zero_gives_no_nan() -> None:
    m, zero = torch.zeros(4), torch.zeros(())
    sign = draw(m, zero, uniform(4))
    assert bool((zero * sign == 0).all())
    assert bool(torch.isfinite(slope(m, zero, sign)).all())
    assert bool(is_inside(m, zero).all())


def test_alpha_e_stops_at_the_limit_and_is_counted() -> None:
    size, scale = StepSize(6.0), torch.tensor([0.5, 0.5, 0.0])
    moved, held_back = size.descend(
        scale, torch.zeros(3), size.of(scale, torch.zeros(3)), torch.tensor([-1e6, 1e6, 1.0]), scalar(0.1)
    )
    assert float(held_back) == 2
    assert moved[:2].tolist() == [pytest.approx(LIMIT / 6), pytest.approx(-LIMIT / 6)]
    assert float(size.of(scale, torch.zeros(3))[2]) == pytest.approx(EPS)


def test_growth_is_as_large_for_a_fall_as_for_a_rise() -> None:
    size, scale = StepSize(6.0), torch.tensor([0.5, 0.5, 0.5])
    for e in (LIMIT / 6, -LIMIT / 6, -1e9):
        alpha = size.of(scale, torch.tensor([0.0, e, 0.01]))
        assert float(size.growth(scale, alpha)) == pytest.approx(math.exp(LIMIT), rel=1e-3)
    still = torch.tensor([0.5, 0.5, 0.0])  # nothing changed in the last group: its alpha is 0
    assert float(size.growth(scale, still)) == 1


@pytest.mark.parametrize("pull", [-1e6, 1e6, 0.0])
def test_bounds_hold_alpha_whatever_pulls(pull: float) -> None:
    size, scale = StepSize(6.0, (5e-4, 5e-2)), torch.tensor([1e-3, 1e-7, 3.0])
    e = torch.zeros(3)
    for _ in range(3):
        e, held_back = size.descend(scale, e, size.of(scale, e), torch.full((3,), pull), scalar(0.1))
        alpha = size.of(scale, e)
        assert 5e-4 * (1 - 1e-6) <= float(alpha.min()) <= float(alpha.max()) <= 5e-2 * (1 + 1e-6)
    if pull:
        assert float(held_back) == 3  # at a bound, though the last step did not cross it
    # One step leads back from a bound: nothing has piled up behind it.
    back, _ = size.descend(scale, e, alpha, torch.full((3,), -math.copysign(50.0, pull)), scalar(0.1))
    if pull:
        assert bool((size.of(scale, back) != alpha).all())


@pytest.mark.parametrize(("granularity", "count"), [("tensor", 5), ("module", 3), ("global", 1)])
def test_groups_are_tensors_modules_or_all(granularity: str, count: int) -> None:
    names = ("a.bias", "a.weight", "b.c.bias", "b.c.weight", "head")
    groups = StepSizeGroups.of(names, granularity)  # type: ignore[arg-type]
    each = {name: scalar(10.0**number) for number, name in enumerate(names)}
    assert groups.count == count
    assert float(groups.sums(each).sum()) == pytest.approx(11111)
    assert groups.spread(groups.largest(each))["a.bias"] == {5: 1.0, 3: 10.0, 1: 10000.0}[count]
