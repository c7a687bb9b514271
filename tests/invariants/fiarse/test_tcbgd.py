"""FIARSE invariants 9 to 15: threshold-controlled biased gradient descent, in torch and from its exported graphs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from edgefl.algorithms.baselines.adamw import adamw as local_adamw
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.algorithms.submodels.tcbgd import tcbgd
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.spec import ModelSpec, sequential
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.importance.carrier import MASK, THETA, VALUES, TopEntriesCarrier
from edgefl.submodels.importance.submodel import Importance, importance
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from tests.invariants.embracingfl.tiny import samples, tiny
from tests.invariants.fiarse.training import (
    BATCH,
    ENGINES,
    LR,
    Client,
    algorithm_of,
    arrays_of,
    batches_of,
    client,
    run_in,
    simulate,
    small_net,
)
from tests.rings.rows import mostly_slow
from tests.support.errors import ConfigError, refuses

GAMMA = 0.3
ONE = "x"


def factors(x: list[float], theta: float, *, remask: bool = True) -> Tensor:
    """f * M of one tensor, every entry of which is held: what a gradient of ones becomes."""
    weights = {ONE: torch.tensor(x)}
    carrier = TopEntriesCarrier({ONE: TensorSpec.of(weights[ONE])}, {}, len(x), remask=remask, bias=True)
    gates = {f"mask.{ONE}": torch.ones(len(x), dtype=torch.bool), "theta": torch.tensor([theta])}
    return carrier.descent({ONE: torch.ones(len(x))}, weights, gates)[ONE]


# 9. Factor table


def test_inv09_the_factor_table() -> None:
    found = factors([0.5, -0.5, 1, -2, 0.75, 5, 0.49, 0], theta=0.5)
    expected = [1.5, 1.5, 1.444444, 1.32, 1.48, 1.165289, 0, 0]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    assert found[-2:].tolist() == [0.0, 0.0]


# 10. Bounds of the factor


@given(
    theta=st.floats(2.0**-99, 2.0**60, width=32),
    ratios=st.lists(st.floats(1, 2.0**20, width=32), min_size=2, max_size=20),
)
@example(theta=35.0, ratios=[932238.0, 932239.0])
def test_inv10_the_factor_falls_towards_one_and_is_even(theta, ratios) -> None:
    sizes = [max(float(np.float32(theta * ratio)), theta) for ratio in sorted(ratios)]
    found = factors(sizes, theta)
    assert (found > 1).all() and (found <= 1.5).all()
    assert (
        found.diff() <= 3 * np.finfo(np.float32).eps
    ).all()  # what float32 rounds; strictly, see the next test
    assert torch.equal(found, factors([-size for size in sizes], theta))


def test_inv10_the_factor_falls_strictly_where_float32_can_tell() -> None:
    assert (factors([0.5 * 1.1**power for power in range(60)], theta=0.5).diff() < 0).all()


@pytest.mark.parametrize("theta", [0.0, 1e-45, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("remask", [True, False])
def test_inv10_the_factor_is_finite_and_one_without_a_threshold(theta: float, remask: bool) -> None:
    found = factors([0.0, -0.0, 1e-45, 1e-30, 1.0, 1e30, 3e38], theta, remask=remask)
    assert found.isfinite().all() and (found <= 1.5).all()
    if theta == 0:
        assert found.tolist() == [1.0] * 7


# 11. Reference step


@dataclass(frozen=True)
class HalfSquare:
    """loss = out^2 / 2; the label is not read."""

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return out.flatten() ** 2 / 2 + 0 * y

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return torch.zeros_like(y)

    def label(self, out: TensorSpec) -> TensorSpec:
        return TensorSpec(())


@pytest.mark.parametrize("engine", ENGINES)
def test_inv11_the_reference_steps(engine: str) -> None:
    module = sequential([("dot", nn.Linear(3, 1, bias=False))])
    spec = ModelSpec("dot", module, TensorSpec((3,)), 1, loss=HalfSquare())
    weight = TensorSpec((1, 3))
    everything = TopEntriesCarrier({"dot.weight": weight}, {}, 3)
    # With momentum the buffer after one step from zero is the gradient, which the graph does not show otherwise.
    algorithm = tcbgd(Objective(module, spec.sample, spec.loss, everything), batch=1, momentum=0.9)
    device = Client.of(algorithm, engine)
    payload = {
        MASK: torch.tensor([0b111], dtype=torch.uint8),
        VALUES: torch.tensor([1, -0.4, 0.6]),
        THETA: [0.5],
    }
    state, batch = device.begin(payload), (torch.tensor([[1.0, 2.0, 3.0]]), torch.zeros(1))
    expected = [
        (2.8, [4.0444444, 0, 12.5652893], [0.7977778, -0.4, -0.0282645]),
        (0.7977778, [1.1756659, 0, 0], [0.7389945, -0.4, -0.0282645]),
        (0.7389945, None, [0.6842573, -0.4, -0.0282645]),
    ]
    for y, grad, x in expected:
        state, metrics = device.step(state, batch, lr=0.05)
        assert float(metrics["loss"]) == pytest.approx(y**2 / 2, rel=1e-6)
        if grad is not None:
            np.testing.assert_allclose(state["momentum.dot.weight"].numpy(), [grad], atol=5e-7, rtol=1e-7)
        np.testing.assert_allclose(state["weights.dot.weight"].numpy(), [x], atol=1e-7)
        state["momentum.dot.weight"] = torch.zeros(1, 3)


# 12. The gradient of a real network


def closed_form(submodel: Importance, x: Tensor, y: Tensor) -> Tensors:
    """plain_masked_grad * f, in float64."""
    found, spec = submodel.cut_of(arrays_of(submodel.spec)), submodel.spec
    module = spec.module.double().train()
    leaves = {name: torch.from_numpy(array).double() for name, array in found.apply(arrays_of(spec)).items()}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    loss = spec.loss.each(torch.func.functional_call(module, leaves, (x.double(),)), y).mean()
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    spec.module.float()
    for name, mask in found.masks.items():
        size, theta = spec.weights[name].double().abs(), found.theta[name]
        factor = 1 + 2 * size * theta / (size + theta) ** 2
        grads[name] = torch.where(torch.from_numpy(mask), grads[name] * factor, 0.0)
    return grads


def assert_close(found: Tensors, expected: Tensors, submodel: Importance) -> None:
    masks = submodel.cut_of(arrays_of(submodel.spec)).masks
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) < 1e-5 * float(value.abs().max()), name
        if name in masks:
            assert not found[name][~torch.from_numpy(masks[name])].any(), "masked entries are exactly zero"


def test_inv12_a_residual_networks_gradient_has_the_factor() -> None:
    submodel = importance(tiny("resnet8 static"), gamma=GAMMA)
    x, y = samples(submodel.spec, 16)
    carried = submodel.carrier.with_switches(remask=True, bias=True, freeze_dropped=True)
    objective = Objective(submodel.suffix, submodel.boundary, carried=carried)
    payload = {n: torch.from_numpy(a) for n, a in submodel.place(arrays_of(submodel.spec), 1).payload.items()}
    weights, gates = carried.unpack(payload)
    given = {"batch.0.x": x, "batch.0.y": y} | {f"state.gate.{name}": gate for name, gate in gates.items()}
    found = gradient(objective, weights, given)[2]
    assert_close(found, closed_form(submodel, x, y), submodel)


@pytest.mark.parametrize("engine", mostly_slow(ENGINES, ["torch"]))
def test_inv12_the_algorithms_gradient_has_the_factor(engine: str) -> None:
    submodel = importance(small_net(), gamma=GAMMA)
    device = client(engine, GAMMA, momentum=0.9)
    [(x, y)] = batches_of(submodel.spec, 1)
    after, _ = device.step(device.begin(submodel.place(arrays_of(submodel.spec), 1).payload), (x, y))
    found = {name: after[f"momentum.{name}"] for name in submodel.spec.weights}
    assert_close(found, closed_form(submodel, x, y), submodel)


# 13. The threshold


@pytest.mark.parametrize("engine", mostly_slow(ENGINES, ["torch"]))
def test_inv13_training_leaves_every_bit_of_the_thresholds_and_masks(engine: str) -> None:
    submodel = importance(small_net(), gamma=GAMMA)
    device = client(engine, GAMMA)
    before = device.begin(submodel.place(arrays_of(submodel.spec), 1).payload)
    *_, after = device.walk(before, batches_of(submodel.spec, 4), LR)
    assert {"gate.theta", "gate.mask.stem.0.weight"} <= before.keys()
    for name in (name for name in before if name.startswith("gate.")):
        assert before[name].numpy().tobytes() == after[name].numpy().tobytes()
    train = algorithm_of(submodel).phases[0].function
    assert not [name for name in train(train.example(0)) if ".gate." in name], "no step gives gates back"
    assert device.update(after).keys() == {VALUES, *submodel.carrier.dense}


def test_inv13_no_gradient_reaches_the_threshold() -> None:
    submodel = importance(small_net(), gamma=GAMMA)
    carrier = submodel.carrier.with_switches(remask=True, bias=True, freeze_dropped=True)
    payload = {n: torch.from_numpy(a) for n, a in submodel.place(arrays_of(submodel.spec), 1).payload.items()}
    weights, gates = carrier.unpack(payload)
    gates["theta"].requires_grad_()
    weights["stem.0.weight"].requires_grad_()
    read = carrier.effective(weights, gates, {}, training=True)
    total = sum(tensor.square().sum() for tensor in read.values())
    of_theta, of_weight = torch.autograd.grad(
        total, (gates["theta"], weights["stem.0.weight"]), allow_unused=True
    )
    assert of_theta is None and bool(of_weight.any())


# 14. Active sets


def active(state: Tensors, submodel: Importance) -> Tensor:
    """M0 and |x| >= theta over all entries, flat."""
    names = list(submodel.carrier.maskable)
    parts = [
        state[f"gate.mask.{name}"] & (state[f"weights.{name}"].abs() >= state["gate.theta"][number])
        for number, name in enumerate(names)
    ]
    return torch.cat([part.flatten() for part in parts])


def walked(engine: str, submodel: Importance, **options: Any) -> list[Tensors]:
    """The states of six steps."""
    device = client(engine, GAMMA, **options)
    payload = submodel.place(arrays_of(submodel.spec), 1).payload
    return list(device.walk(device.begin(payload), batches_of(submodel.spec, 6), LR))


def flat(state: Tensors, submodel: Importance) -> Tensor:
    return torch.cat([state[f"weights.{name}"].flatten() for name in submodel.carrier.maskable])


@pytest.mark.parametrize(
    ("engine", "momentum"),
    mostly_slow(itertools.product(ENGINES, (0.0, 0.9)), [("torch", 0.0), ("torch", 0.9)]),
)
def test_inv14_active_sets_only_shrink(engine: str, momentum: float) -> None:
    submodel = importance(small_net(), gamma=GAMMA)
    states = walked(engine, submodel, momentum=momentum, weight_decay=0.01 if momentum else 0.0)
    sets = [active(state, submodel) for state in states]
    assert int(sets[0].sum()) == submodel.kept, "training starts from M0"
    for before, after, was, now in zip(sets, sets[1:], states, states[1:], strict=False):
        assert not (after & ~before).any()
        assert torch.equal(flat(was, submodel)[~before], flat(now, submodel)[~before])
    assert int(sets[-1].sum()) < int(sets[0].sum()) - 5, "the rate is high enough to drop something"
    assert flat(states[-1], submodel)[sets[0] & ~sets[-1]].any(), "dropped, not zeroed"


def test_inv14_momentum_moves_what_dropped_out_only_if_allowed() -> None:
    submodel, moved = importance(small_net(), gamma=GAMMA), {}
    for freeze in (True, False):
        states = walked("torch", submodel, momentum=0.9, freeze_dropped=freeze)
        pairs = list(itertools.pairwise(states))
        moved[freeze] = any(
            bool((flat(was, submodel) != flat(now, submodel))[~active(was, submodel)].any())
            for was, now in pairs
        )
        never_sent = ~active(states[0], submodel)
        assert not flat(states[-1], submodel)[never_sent].any()
    assert moved == {True: False, False: True}


@pytest.mark.parametrize("engine", mostly_slow(ENGINES, ["torch"]))
def test_inv14_adamw_moves_nothing_that_dropped_out(engine: str) -> None:
    submodel = importance(small_net(), gamma=GAMMA)
    states = walked(engine, submodel, adamw=True)
    sets = [active(state, submodel) for state in states]
    for before, was, now in zip(sets, states, states[1:], strict=False):
        assert torch.equal(flat(was, submodel)[~before], flat(now, submodel)[~before])
    assert int(sets[-1].sum()) < int(sets[0].sum()) - 5, "the rate is high enough to drop something"

    device = client(engine, GAMMA, adamw=True)
    begun = device.begin(submodel.place(arrays_of(submodel.spec), 1).payload)
    [(x, y)] = batches_of(submodel.spec, 1)
    after, _ = device.step(begun, (x, y), LR)
    # The first step is lr g / (|g| + eps): the sign of the biased, masked gradient.
    for name, g in closed_form(submodel, x, y).items():
        expected = begun[f"weights.{name}"] - LR * (g / (g.abs() + 1e-8)).float()
        clear = (g.abs() > 1e-5) | (g == 0)
        torch.testing.assert_close(after[f"weights.{name}"][clear], expected[clear], rtol=0, atol=1e-3 * LR)


def test_inv14_adamw_of_a_whole_model_is_adamw_and_refuses_momentum() -> None:
    objective = Objective.of(importance(small_net(), gamma=1.0))
    found = tcbgd(objective, batch=BATCH, adamw=True).phases[0].function
    plain = local_adamw(objective, batch=BATCH, beta2=0.95, weight_decay=0.0).phases[0].function
    assert to_onnx(capture(found)) == to_onnx(capture(plain))
    with refuses(ConfigError, momentum=0.9):
        tcbgd(objective, adamw=True, momentum=0.9)


# 15. Switches


OFF = {"remask": False, "bias": False}


@pytest.mark.parametrize(
    ("model", "options"),
    mostly_slow(
        [("mlp", {}), ("small", {}), ("small", {"momentum": 0.9, "weight_decay": 0.01})],
        [("mlp", {}), ("small", {"momentum": 0.9, "weight_decay": 0.01})],
    ),
)
def test_inv15_switched_off_its_graph_is_that_of_sgd(model: str, options: dict[str, float]) -> None:
    submodel = importance(
        build_model("mlp", size=4, hidden=[5]) if model == "mlp" else small_net(), gamma=GAMMA
    )
    off = algorithm_of(submodel, **OFF, **options)
    plain = sgd(Objective.of(submodel), batch=BATCH, **{"momentum": 0.0, "weight_decay": 0.0, **options})
    ours, theirs = (algorithm.phases[0].function for algorithm in (off, plain))
    assert to_onnx(capture(ours)) == to_onnx(capture(theirs))


@pytest.mark.parametrize(
    ("engine", "remask", "bias"),
    mostly_slow(
        itertools.product(ENGINES, (True, False), (True, False)),
        itertools.product(("torch",), (True, False), (True, False)),
    ),
)
def test_inv15_each_switch_does_what_the_plain_simulation_does(engine: str, remask: bool, bias: bool) -> None:
    submodel = importance(small_net(), gamma=GAMMA)
    found = submodel.cut_of(arrays_of(submodel.spec))
    batches = batches_of(submodel.spec, 5)
    expected = simulate(submodel.spec, found.masks, found.theta, batches, LR, remask=remask, bias=bias)
    device = client(engine, GAMMA, remask=remask, bias=bias)
    *_, last = device.walk(device.begin(submodel.place(arrays_of(submodel.spec), 1).payload), batches, LR)
    for name, value in expected.items():
        mask = torch.from_numpy(found.masks[name]) if name in found.masks else ...
        np.testing.assert_allclose(last[f"weights.{name}"][mask].numpy(), value[mask].numpy(), atol=2e-6)


def test_inv15_the_four_settings_of_the_switches_give_four_results() -> None:
    submodel, found = importance(small_net(), gamma=GAMMA), set()
    for remask, bias in itertools.product((True, False), repeat=2):
        *_, last = walked("torch", submodel, remask=remask, bias=bias)
        found.add(flat(last, submodel).numpy().tobytes())
    assert len(found) == 4


def test_inv15_without_a_threshold_it_is_plain_sgd() -> None:
    submodel = importance(small_net())
    assert submodel.carrier is None
    algorithm = algorithm_of(submodel)
    plain = sgd(Objective.of(submodel), batch=BATCH, momentum=0.0, weight_decay=0.0)
    step = algorithm.phases[0].function
    example = step.example(3)
    ours, theirs = run_in("torch", step)(example), plain.phases[0].function(example)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
