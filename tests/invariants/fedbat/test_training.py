"""FedBAT's local training: invariants 15 to 19 of fedbat.md, section 7."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl import algorithms
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.codecs.binarize import StepSize, draw, is_inside, slope
from edgefl.codecs.growth import runaway_warning
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.importance.submodel import importance
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.update.form import CodeEncoding, FloatEncoding
from edgefl_device.data import samples as local
from edgefl_device.data.samples import Batches
from tests.codecs.coding import Coding
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
from tests.invariants.fiarse.training import small_net
from tests.rings.rows import mostly_slow
from tests.support.errors import ConfigError, ModelError, refuses
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
            out = ~is_inside(old, alpha[number])
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
        expected = m - 0.1 * grads[name] * is_inside(m, alpha[number])
        assert close(after[f"change.{name}"], expected), name


def distance(found: Tensors, expected: Tensors) -> float:
    """Largest difference of any tensor, relative to how far the step moved it."""
    return max(
        float((found[n].double() - expected[n]).abs().max() / expected[n].abs().max()) for n in expected
    )


@pytest.mark.parametrize("rho", [0.0, RHO])
def test_a_step_is_autograd_through_the_printed_operator(rho: float) -> None:
    trace, between = trained(**({} if rho == RHO else {"rho": rho})), False
    for index in range(STEPS // 2, STEPS):
        expected = Plain(SPEC, rho)(trace.states[index], trace.given[index])
        if not rho:
            assert not expected.pop("log_scale").any() and not trace.states[index + 1]["log_scale"].any()
        assert distance(trace.states[index + 1], expected) < 1e-4
        old, new = (StepSize(rho).of(s["scale"], s["log_scale"]) for s in trace.states[index : index + 2])
        for number, name in enumerate(TRAINED):
            m = trace.states[index][f"change.{name}"]
            between |= not torch.equal(is_inside(m, old[number]), is_inside(m, new[number]))
    assert between or not rho, "the order of the updates of m and alpha matters"


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
def test_momentum_and_decay_are_those_of_autograd(options: dict[str, float]) -> None:
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


# -- FedBAT's switches: what ambiguities of the paper became (fedbat.md 8), and what contradicts itself ----


NORMED = small_net()
SWITCHES_FEED, SWITCHES_STEPS = Feed.of(SPEC), 6


# -- switches --------------------------------------------------------------------------------------------------


def test_groups_share_a_step_size_and_its_gradient() -> None:
    for granularity, count in (
        ("tensor", len(TRAINED)),
        ("module", len({n.rpartition(".")[0] for n in TRAINED})),
        ("global", 1),
    ):
        algorithm = algorithm_of(SPEC, granularity=granularity)
        trace = walk(algorithm, SPEC.weights, SWITCHES_FEED)
        assert trace.states[-1]["scale"].shape == (count,)
        assert algorithm.form.sections[0].scales == count
        update = run_round(drawing(algorithm, 1), SPEC.weights, SWITCHES_FEED).update
        assert update["scales"].shape == (count,)
    before, after, given = trace.states[-2], trace.states[-1], trace.given[-1]
    size = StepSize(6.0)
    alpha = size.of(before["scale"], before["log_scale"])[0]
    signs = {name: draw(before[f"change.{name}"], alpha, given[f"noise.{name}"]) for name in TRAINED}
    at = select(before, "weights") | {n: before[f"weights.{n}"] + alpha * sign for n, sign in signs.items()}
    grads = gradient(_objective(), at, {n: t for n, t in given.items() if n.startswith("batch.")})[2]
    pull = sum(
        float((grads[n] * slope(before[f"change.{n}"], alpha, sign)).sum()) for n, sign in signs.items()
    )
    expected = float(before["log_scale"]) - 0.1 * 6 * float(alpha) * pull
    assert float(after["log_scale"]) == pytest.approx(expected, abs=1e-5)


def test_without_binarize_1d_biases_and_norms_are_sent_whole() -> None:
    feed = Feed.of(NORMED)
    algorithm = drawing(algorithm_of(NORMED, binarize_1d=False), 1)
    coded, plain = (section.names for section in algorithm.form.sections)
    assert (coded, plain) == (
        ("body.0.weight", "head.2.weight", "stem.0.weight"),
        ("body.1.bias", "body.1.weight", "head.2.bias", "stem.1.bias", "stem.1.weight"),
    )
    assert [type(section.encoding) for section in algorithm.form.sections] == [CodeEncoding, FloatEncoding]
    left = walk(algorithm, NORMED.weights, feed).states[-1]
    found = decoded(algorithm, NORMED.weights, run_round(algorithm, NORMED.weights, feed).update)
    for name in plain:
        assert np.array_equal(found[name], left[f"change.{name}"].numpy())
    for name in coded:
        assert len(np.unique(np.abs(found[name]))) == 1


@pytest.mark.parametrize("bits", [6, 32])
def test_moving_statistics_travel_as_changes(bits: int) -> None:
    spec = tiny("resnet8")
    feed, weights = Feed.of(spec), weights_of(spec)
    algorithm = drawing(algorithm_of(spec, steps=2, statistics=bits), 1)
    left = walk(algorithm, weights, feed).states[-1]
    found = decoded(algorithm, weights, run_round(algorithm, weights, feed).update)
    for name in _objective_of(spec).fixed:
        change = (left[f"weights.{name}"] - weights[name]).numpy()
        assert np.abs(change).max() > 0
        allowed = 1e-7 if bits == 32 else np.abs(change).max() / 31
        assert np.abs(found[name] - change).max() <= allowed, name


def _objective_of(spec) -> Objective:  # type: ignore[no-untyped-def]
    return Objective.of(OutputSide(spec, 0, 1))


def test_upload_modes_send_a_new_draw_the_last_one_or_the_sign() -> None:
    modes = {
        mode: drawing(algorithm_of(SPEC, upload_mode=mode), 5)
        for mode in ("resample_final", "last_forward", "det_sign")
    }
    found = {
        mode: decoded(p, SPEC.weights, run_round(p, SPEC.weights, SWITCHES_FEED).update)
        for mode, p in modes.items()
    }
    trace = walk(modes["last_forward"], SPEC.weights, SWITCHES_FEED)
    before, last = trace.states[-2], trace.states[-1]
    size = StepSize(6.0)
    old, new = (size.of(state["scale"], state["log_scale"]) for state in (before, last))
    noise = uniform(algorithm_of(SPEC).finish, torch.Generator().manual_seed(5))
    for number, name in enumerate(TRAINED):
        m, zeta = last[f"change.{name}"], noise[f"noise.{name}"]
        expected = {
            "resample_final": new[number] * draw(m, new[number], zeta),
            "last_forward": old[number]
            * draw(before[f"change.{name}"], old[number], trace.given[-1][f"noise.{name}"]),
            "det_sign": new[number] * torch.where(m == 0, 1 - 2 * (zeta >= 0.5).float(), m.sign()),
        }
        for mode, value in expected.items():
            assert np.allclose(found[mode][name], value.numpy(), rtol=1e-6, atol=0), (mode, name)
    assert "state.sent.codes" not in modes["resample_final"].start(prefixed("weights", weights_of(SPEC)))


def _first_step() -> Tensors:
    """m of FedAvg after one step."""
    algorithm = sgd(_objective(), batch=BATCH, steps=1, lr=0.1, momentum=0.0, weight_decay=0.0)
    left = run_round(algorithm, SPEC.weights, SWITCHES_FEED).update
    return {name: left[name] - SPEC.weights[name] for name in left}


def test_fedbat_inf_takes_the_largest_change_as_alpha_in_each_step() -> None:
    algorithm = algorithm_of(SPEC, step_size="largest", phi=0.0)
    trace = walk(algorithm, SPEC.weights, SWITCHES_FEED)
    assert trace.phases == ["binarize"] * SWITCHES_STEPS
    m = select(trace.states[1], "change")
    # alpha of the first step is norm_inf(0) = 0, so that S(0, 0) = 0, and the step is one of FedAvg.
    assert all(torch.allclose(m[name], tensor, atol=2e-6) for name, tensor in _first_step().items())
    update = run_round(drawing(algorithm, 1), SPEC.weights, SWITCHES_FEED).update
    largest = [float(trace.states[-1][f"change.{name}"].abs().max()) for name in TRAINED]
    assert update["scales"].tolist() == pytest.approx(largest, rel=1e-6)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in trace.states[-1].values())


def test_a_tensor_that_did_not_change_is_sent_with_alpha_zero() -> None:
    # With labels of one class and logits that are sure of it, nothing has a gradient; inputs of 0 move no kernel.
    feed = Feed(torch.zeros(8, *SPEC.sample.shape), torch.zeros(8, dtype=torch.int64))
    algorithm = drawing(algorithm_of(SPEC), 1)
    found = decoded(algorithm, SPEC.weights, run_round(algorithm, SPEC.weights, feed).update)
    still = {name for name, value in found.items() if not value.any()}
    first = next(name for name in TRAINED if SPEC.weights[name].dim() == 4)
    assert first in still and still != set(found)
    assert all(np.isfinite(value).all() for value in found.values())


@pytest.mark.parametrize("step_size", ["learned", "largest"])
def test_an_update_that_is_not_finite_has_step_sizes_that_are_not(step_size: str) -> None:
    algorithm = drawing(algorithm_of(SPEC, step_size=step_size), 1)
    state = walk(algorithm, SPEC.weights, SWITCHES_FEED).states[-1]
    state[f"change.{TRAINED[0]}"] = torch.full_like(state[f"change.{TRAINED[0]}"], math.nan)
    available = (
        prefixed("state", state) | prefixed("weights", SPEC.weights) | {"hyper.rho": torch.tensor(6.0)}
    )
    scales = algorithm.finish({name: available[name] for name in algorithm.finish.inputs})["update.scales"]
    assert torch.isfinite(scales).tolist() == [False] + [True] * (len(TRAINED) - 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"phi": 0.0}, "use a larger phi"),
        ({"phi": 0.1, "steps": 9}, "use a larger phi"),
        ({"phi": 1.5}, "phi is the share"),
        ({"rho": -1.0}, "rho is at least 0"),
        ({"rho": math.inf}, "rho is at least 0 and finite"),
        ({"phi": 1.0, "upload_mode": "last_forward"}, "use a smaller phi"),
        ({"alpha_range": (0.1, 0.01)}, "two numbers above 0"),
        ({"alpha_range": (0.1, 0.2), "step_size": "largest"}, "leave it out"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        algorithms.build("fedbat", _objective(), **options)


def test_rho_is_announced_with_the_round_and_needs_no_new_graph() -> None:
    algorithm = drawing(algorithm_of(SPEC), 1)
    assert algorithm.hyper == {"lr": 0.1, "rho": 6.0}
    other = drawing(algorithm_of(SPEC, rho=0.5), 1)
    announced = run_round(algorithm, SPEC.weights, SWITCHES_FEED, hyper={"rho": 0.5}).update
    expected, default = (run_round(p, SPEC.weights, SWITCHES_FEED).update for p in (other, algorithm))
    assert all(torch.equal(announced[name], expected[name]) for name in expected)
    assert not torch.equal(announced["scales"], default["scales"])
    assert "rho" not in algorithm_of(SPEC, step_size="largest").hyper


@pytest.mark.parametrize("bits", [1, 9, 16])
def test_statistics_of_other_widths_are_refused(bits: int) -> None:
    with refuses(ConfigError, bits=bits):
        algorithm_of(SPEC, statistics=bits)


# -- submodels of single entries -------------------------------------------------------------------------------


def test_entries_that_a_tier_does_not_hold_stay_zero_and_do_not_count() -> None:
    submodel = importance(NORMED, gamma=0.4)
    weights = {name: tensor.numpy() for name, tensor in NORMED.weights.items()}
    placement = submodel.place(weights, 1)
    payload = {name: torch.from_numpy(array) for name, array in placement.payload.items()}
    algorithm = algorithms.build("fedbat", Objective.of(submodel), batch=BATCH, steps=SWITCHES_STEPS)
    trace = walk(algorithm, payload, Feed.of(NORMED))
    warm, last = trace.states[SWITCHES_STEPS // 2], trace.states[-1]
    masks = select(last, "gate.mask")
    coded = sorted(name for name, _ in NORMED.module.named_parameters())
    for number, name in enumerate(coded):
        held = masks.get(name, torch.ones_like(last[f"change.{name}"], dtype=torch.bool))
        assert not last[f"change.{name}"][~held].any()
        expected = float(warm[f"change.{name}"].abs().sum() / held.sum().clamp(min=1))
        assert float(warm["scale"][number]) == pytest.approx(expected, rel=1e-5), name
    assert any(bool((~mask).any()) for mask in masks.values())


# -- FedBAT's step sizes can run away --------------------------------------------------------------------------


# -- step sizes that run away ----------------------------------------------------------------------------------

RUN = {"batch": 32, "steps": 100, "rho": 6.0, "lr": 0.1}
SEEDS = range(5)


def runaway(seed: int, **options: object) -> Trace:
    spec = regression(seed)
    return walk(algorithm_of(spec, **RUN, **options), spec.weights, Feed.linear(spec, seed))


@pytest.mark.parametrize("seed", mostly_slow(SEEDS, [0, 3]))
def test_on_356_parameters_step_sizes_run_away(seed: int) -> None:
    assert sum(p.numel() for p in regression(0).module.parameters()) == 356
    trace = runaway(seed)
    told = float(np.mean(trace.metric("alpha_growth")))
    assert runaway_warning({"alpha_growth": told}) is not None, told
    assert trace.metric("clamped")[-1] > 0, "and a step size is at its limit in the end"


@pytest.mark.slow
def test_the_range_of_the_public_code_ends_the_runaway() -> None:
    for seed in SEEDS:
        free, limited = runaway(seed), runaway(seed, alpha_range=(5e-4, 5e-2))
        assert max(limited.metric("alpha_growth")) <= 100
        assert sum(limited.metric("clamped")) > 0
        assert max(limited.metric("loss")) < 3 * limited.metric("loss")[0]
        assert max(free.metric("loss")) >= max(limited.metric("loss"))


@pytest.mark.slow
def test_a_classifier_does_not_set_off_the_alarm() -> None:
    trace = walk(algorithm_of(SPEC, steps=40, batch=32), SPEC.weights, Feed.of(SPEC))
    told = float(np.mean(trace.metric("alpha_growth")))
    assert told < 5 and runaway_warning({"alpha_growth": told}) is None
    assert not any(trace.metric("clamped"))


def test_a_warning_names_the_remedy_and_other_codecs_have_none() -> None:
    assert "alpha_range" in (runaway_warning({"loss": 1.0, "alpha_growth": 1e4}) or "")
    assert runaway_warning({"loss": 1.0}) is None and runaway_warning({"alpha_growth": 1.0}) is None


# -- what is random in a round comes from streams of their own -------------------------------------------------


SEED, STREAMS_STEPS, SAMPLES, STREAMS_BATCH = 5, 6, 40, 8


def ports(function: Function) -> list[str]:
    return [name for name in function.inputs if name.startswith("noise.")]


def test_batches_are_the_same_whatever_a_method_draws() -> None:
    alone, beside = Batches(SEED, SAMPLES, STREAMS_BATCH), Batches(SEED, SAMPLES, STREAMS_BATCH)
    for step in range(STREAMS_STEPS):
        expected = alone.indices(0, step)
        for number in range(3):
            local.noise(SEED, step, number, (50,), "float32")
        assert np.array_equal(beside.indices(0, step), expected)


@pytest.mark.parametrize("codec", ["fedbat", "signsgd", "fedpaq"])
def test_every_port_of_every_step_draws_anew_and_the_same_for_a_seed(codec: str) -> None:
    algorithm = Coding.of(codec).algorithm
    function = algorithm.finish
    shape, names = (100,), ports(function)
    assert names
    drawn = [
        local.noise(SEED, step, number, shape, "float32")
        for step in range(STREAMS_STEPS)
        for number in range(len(names))
    ]
    assert len({array.tobytes() for array in drawn}) == len(drawn)
    assert np.array_equal(local.noise(SEED, 2, 1, shape, "float32"), drawn[2 * len(names) + 1])
    assert not np.array_equal(local.noise(SEED + 1, 0, 0, shape, "float32"), drawn[0])
