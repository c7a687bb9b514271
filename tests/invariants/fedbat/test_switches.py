"""FedBAT's switches: what ambiguities of the paper became (fedbat.md 8), and what contradicts itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from edgefl import algorithms
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.codecs.binarize import StepSize, draw, slope
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.errors import ConfigError, ModelError
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.importance.submodel import importance
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.update.form import Codes, FloatValues
from tests.invariants.embracingfl.tiny import tiny, weights_of
from tests.invariants.fedbat.tiny import BATCH, Feed, algorithm_of, decoded, drawing, uniform, walk
from tests.invariants.fiarse.training import small_net
from tests.support.reference import run_round

SPEC = tiny("cnn")
NORMED = small_net()
FEED, STEPS = Feed.of(SPEC), 6
TRAINED = sorted(name for name, _ in SPEC.module.named_parameters())


def _objective() -> Objective:
    return Objective.of(OutputSide(SPEC, 0, 1))


# -- switches --------------------------------------------------------------------------------------------------


def test_groups_share_a_step_size_and_its_gradient() -> None:
    for granularity, count in (
        ("tensor", len(TRAINED)),
        ("module", len({n.rpartition(".")[0] for n in TRAINED})),
        ("global", 1),
    ):
        algorithm = algorithm_of(SPEC, granularity=granularity)
        trace = walk(algorithm, SPEC.weights, FEED)
        assert trace.states[-1]["scale"].shape == (count,)
        assert algorithm.form.sections[0].scales == count
        update = run_round(drawing(algorithm, 1), SPEC.weights, FEED).update
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
    assert [type(section.encoding) for section in algorithm.form.sections] == [Codes, FloatValues]
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
        mode: decoded(p, SPEC.weights, run_round(p, SPEC.weights, FEED).update) for mode, p in modes.items()
    }
    trace = walk(modes["last_forward"], SPEC.weights, FEED)
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
    left = run_round(algorithm, SPEC.weights, FEED).update
    return {name: left[name] - SPEC.weights[name] for name in left}


def test_fedbat_inf_takes_the_largest_change_as_alpha_in_each_step() -> None:
    algorithm = algorithm_of(SPEC, step_size="largest", phi=0.0)
    trace = walk(algorithm, SPEC.weights, FEED)
    assert trace.phases == ["binarize"] * STEPS
    m = select(trace.states[1], "change")
    # alpha of the first step is norm_inf(0) = 0, so that S(0, 0) = 0, and the step is one of FedAvg.
    assert all(torch.allclose(m[name], tensor, atol=2e-6) for name, tensor in _first_step().items())
    update = run_round(drawing(algorithm, 1), SPEC.weights, FEED).update
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
    state = walk(algorithm, SPEC.weights, FEED).states[-1]
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
    announced = run_round(algorithm, SPEC.weights, FEED, hyper={"rho": 0.5}).update
    expected, default = (run_round(p, SPEC.weights, FEED).update for p in (other, algorithm))
    assert all(torch.equal(announced[name], expected[name]) for name in expected)
    assert not torch.equal(announced["scales"], default["scales"])
    assert "rho" not in algorithm_of(SPEC, step_size="largest").hyper


@pytest.mark.parametrize("bits", [1, 9, 16])
def test_statistics_of_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="2 to 8 bits each, or in 32 as float32"):
        algorithm_of(SPEC, statistics=bits)


# -- submodels of single entries -------------------------------------------------------------------------------


def test_entries_that_a_tier_does_not_hold_stay_zero_and_do_not_count() -> None:
    submodel = importance(NORMED, gamma=0.4)
    weights = {name: tensor.numpy() for name, tensor in NORMED.weights.items()}
    placement = submodel.place(weights, 1)
    payload = {name: torch.from_numpy(array) for name, array in placement.payload.items()}
    algorithm = algorithms.build("fedbat", Objective.of(submodel), batch=BATCH, steps=STEPS)
    trace = walk(algorithm, payload, Feed.of(NORMED))
    warm, last = trace.states[STEPS // 2], trace.states[-1]
    masks = select(last, "gate.mask")
    coded = sorted(name for name, _ in NORMED.module.named_parameters())
    for number, name in enumerate(coded):
        held = masks.get(name, torch.ones_like(last[f"change.{name}"], dtype=torch.bool))
        assert not last[f"change.{name}"][~held].any()
        expected = float(warm[f"change.{name}"].abs().sum() / held.sum().clamp(min=1))
        assert float(warm["scale"][number]) == pytest.approx(expected, rel=1e-5), name
    assert any(bool((~mask).any()) for mask in masks.values())
