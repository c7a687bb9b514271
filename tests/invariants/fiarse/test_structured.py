"""FIARSE by whole channels (fiarse.md 8.3, R4 and R5): group gradient, thresholds over channels, training and averaging."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.spec import ModelSpec, sequential
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.channels.axes import Atom
from edgefl.submodels.channels.narrow import channels_of, narrow
from edgefl.submodels.importance.submodel import importance
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.structured.carrier import THETA, ChannelCarrier, Measure
from edgefl.submodels.structured.groups import ChannelDim, ChannelGroup
from edgefl.submodels.structured.submodel import Structured, importance_structured
from edgefl.wire.regions import extract
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from tests.invariants.fiarse.training import (
    BATCH,
    Client,
    algorithm_of,
    arrays_of,
    batches_of,
    blobs_for,
    bundle_of,
    drawn_batches,
    small_net,
    train_on_device,
)
from tests.parity.rounds import local_data
from tests.rings.rows import mostly_slow
from tests.submodels.nets import model, rows
from tests.support.arrays import as_tensors
from tests.support.reference import partial_average, run_round

X, G, HALF = torch.tensor([[0.6, -0.8]]), torch.tensor([[1.0, 2.0]]), torch.tensor([0.5])
GAMMA, LR = 0.4, 0.3


@cache
def resnet(**options: object) -> Structured:
    return importance_structured(model("resnet8"), gamma=GAMMA, **options)  # type: ignore[arg-type]


def payload_of(part: Structured) -> Tensors:
    return {name: torch.from_numpy(a) for name, a in part.place(arrays_of(part.spec), 1).payload.items()}


def carrier_of(part: Structured, **switches: bool) -> ChannelCarrier:
    assert part.carrier is not None
    return part.carrier.with_switches(**{"remask": True, "bias": True, "freeze_dropped": True} | switches)


def raised(part: Structured, share: float = 0.5) -> Tensors:
    """The payload with thresholds that ``share`` of the channels of each layer fall below."""
    payload, carrier = payload_of(part), carrier_of(part)
    scores = [carrier.score(group, payload) for group in carrier.groups]
    payload[THETA] = torch.stack([score.quantile(share, interpolation="higher") for score in scores])
    return payload


# The gradient of a group (R4)


def group_gradient(x: Tensor, g: Tensor, theta: Tensor, measure: Measure) -> Tensor:
    """What devices descend along for one kernel per row of ``x`` and ``g``, each with its own threshold."""
    names = [str(row) for row in range(len(x))]
    parts = [ChannelDim(name, 0, np.zeros(1, np.int64)) for name in names]
    made = tuple(ChannelGroup(Atom(1), (part,), (part,), (), moving=False) for part in parts)
    weights, grads = (dict(zip(names, every.split(1), strict=True)) for every in (x, g))
    carrier = ChannelCarrier({name: TensorSpec.of(row) for name, row in weights.items()}, made, measure)
    flow = carrier.with_switches(remask=True, bias=True, freeze_dropped=True).descent(
        grads, weights, {"theta": theta}
    )
    return torch.cat([flow[name] for name in names])


@pytest.mark.parametrize(
    ("measure", "expected"), [("mean", [0.6527778, 2.3472222]), ("rms", [0.7088312, 2.3882251])]
)
def test_r4_the_gradient_of_the_spec_s_block(measure, expected) -> None:
    np.testing.assert_allclose(group_gradient(X, G, HALF, measure).numpy(), [expected], atol=5e-7)


@pytest.mark.parametrize("measure", ["mean", "rms"])
def test_r4_a_group_below_its_threshold_has_no_gradient(measure) -> None:
    assert group_gradient(X, G, torch.tensor([0.9]), measure).tolist() == [[0.0, 0.0]]
    assert torch.equal(group_gradient(X, G, torch.tensor([0.0]), measure), G)
    zeros = torch.zeros(2, 2)
    assert torch.equal(group_gradient(zeros, torch.ones(2, 2), torch.zeros(2), measure), torch.ones(2, 2))


@pytest.mark.parametrize("measure", ["mean", "rms"])
def test_r4_a_group_of_one_entry_is_equation_3(measure) -> None:
    x, theta = torch.tensor([0.5, -0.7, 3.0, 0.2, -0.4]), 0.4
    f = 1 + 2 * x.abs() * theta / (x.abs() + theta) ** 2
    found = group_gradient(x[:, None], torch.ones(5, 1), torch.full((5,), theta), measure)[:, 0]
    torch.testing.assert_close(found, torch.where(x.abs() >= theta, f, 0.0))


@given(seed=st.integers(0, 2**16), n=st.integers(1, 6), measure=st.sampled_from(["mean", "rms"]))
def test_r4_the_gradient_is_the_derivative_of_the_surrogate(seed, n, measure) -> None:
    torch.manual_seed(seed)
    x, g, theta = (
        torch.randn(4, n).double().requires_grad_(),
        torch.randn(4, n).double(),
        torch.rand(4).double(),
    )
    score = x.abs().mean(1) if measure == "mean" else x.square().mean(1).sqrt()
    (expected,) = torch.autograd.grad((x * through(score, theta)[:, None] * g).sum(), x)
    torch.testing.assert_close(group_gradient(x.detach(), g, theta, measure), expected, rtol=1e-6, atol=1e-6)


def through(score: Tensor, theta: Tensor) -> Tensor:
    """The mask, whose derivative is that of the probability p."""
    p = ((score - theta) / (score + theta)).clamp(0, 1)
    return (score >= theta).to(score.dtype) + p - p.detach()


# The gradient of a network


@pytest.mark.sample(3)
@pytest.mark.parametrize("measure", ["mean", "rms"])
@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["resnet8", "mlp", "MobileNet", "bilstm", "HeadSized"], ["resnet8", "mlp", "bilstm", "HeadSized"]
    ),
)
def test_r5_a_networks_gradient_is_that_through_its_masks(name: str, measure) -> None:
    """Kernels, biases and norm pairs of a channel times one mask, differentiated by torch."""
    part = importance_structured(model(name), gamma=0.6, measure=measure)
    carrier = carrier_of(part)
    weights, gates = carrier.unpack({name: tensor.double() for name, tensor in payload_of(part).items()})
    gates["theta"] = gates["theta"] * 0.8
    objective = replace(Objective.of(part), carried=carrier)
    x = rows(part.spec.sample, 6)
    x = x.double() if x.is_floating_point() else x
    y = torch.arange(6) % 2
    given_ = {"batch.0.x": x, "batch.0.y": y} | {f"state.gate.{name}": gate for name, gate in gates.items()}
    found = gradient(objective, weights, given_)[2]

    leaves = {key: weights[key].clone().requires_grad_() for key in objective.trainable}
    read = dict(leaves)
    for group, theta in zip(carrier.groups, gates["theta"], strict=True):
        entries = [leaves[p.name].movedim(p.dim, 0)[torch.from_numpy(p.positions)] for p in group.scored]
        flat = torch.cat([entry.flatten(1) for entry in entries], dim=1)
        mask = through(flat.abs().mean(1) if measure == "mean" else flat.square().mean(1).sqrt(), theta)
        for p in group.own:
            along = torch.ones(len(p.members), dtype=torch.float64).index_put(
                (torch.from_numpy(p.positions.T.copy()),), mask.expand(p.positions.shape[1], -1)
            )
            read[p.name] = read[p.name] * along.reshape(
                [-1 if d == p.dim else 1 for d in range(read[p.name].dim())]
            )
    state = read | {key: weights[key].clone() for key in objective.fixed}
    out = torch.func.functional_call(part.suffix.train(), state, (x,))
    grads = torch.autograd.grad(part.spec.loss.each(out, y).mean(), list(leaves.values()))
    plain = gradient(replace(objective, carried=carrier_of(part, bias=False)), weights, given_)[2]
    for key, expected in zip(leaves, grads, strict=True):
        torch.testing.assert_close(found[key], expected, rtol=1e-6, atol=1e-8, msg=key)
    assert any(not torch.allclose(found[key], plain[key], rtol=1e-2) for key in leaves), "the mask has a say"


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["resnet8", "MobileNet", "cnn", "mlp", "bilstm", "HeadSized", "Dense"],
        ["resnet8", "mlp", "bilstm", "HeadSized"],
    ),
)
def test_r5_a_channel_below_its_threshold_is_as_good_as_absent(name: str) -> None:
    spec = model(name)
    part = importance_structured(spec, gamma=0.7)
    carrier, payload = carrier_of(part), raised(part)
    weights, gates = carrier.unpack(payload)
    read = carrier.effective(weights, gates, {}, training=True)
    selection, dropped = dict(part.select(arrays_of(spec))), False
    for group, theta in zip(carrier.groups, payload[THETA], strict=True):
        held = (carrier.score(group, weights) >= theta).tolist()
        dropped |= not all(held)
        selection[group.atom] = tuple(
            index for index, stays in zip(selection[group.atom], held, strict=True) if stays
        )
    assert dropped
    smaller = narrow(spec, channels_of(spec), selection)
    x = rows(spec.sample)
    with torch.no_grad():
        part.suffix.load_state_dict(read)
        found, expected = part.suffix.eval()(x), smaller.eval()(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(carrier.effective(weights, gates, {}, training=False), weights, rtol=0, atol=0)


def frozen_reader(also_trained: bool) -> ModelSpec:
    """Moving statistics of channels that a frozen layer reads, and maybe a trained one beside it."""
    torch.manual_seed(0)
    reader = nn.Linear(6, 4)
    reader.requires_grad_(False)

    class Readers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.trained = reader, nn.Linear(6, 4) if also_trained else None

        def forward(self, x: Tensor) -> Tensor:
            x = x.mean((2, 3))
            return self.frozen(x) if self.trained is None else self.frozen(x) + self.trained(x)

    stem = nn.Sequential(nn.Conv2d(3, 6, 3), BatchNorm(6, mode="global"), nn.ReLU())
    return ModelSpec("tuned", sequential([("stem", stem), ("head", Readers())]), TensorSpec((3, 8, 8)), 4)


@pytest.mark.parametrize("also_trained", [False, True])
def test_r5_a_dropped_channel_is_absent_for_frozen_readers_too(also_trained: bool) -> None:
    part = importance_structured(frozen_reader(also_trained), gamma=0.7)
    objective = replace(Objective.of(part), carried=carrier_of(part))
    weights, gates = objective.carrier.unpack(payload_of(part))
    theta, x, y = gates["theta"], rows(part.spec.sample, 6), torch.arange(6) % 4

    def loss(theta: Tensor, stem: float) -> Tensor:
        params = {n: weights[n] * stem if n.startswith("stem") else weights[n] for n in objective.trainable}
        fixed = {n: weights[n] for n in objective.fixed}
        return objective(params, fixed, x, y, {}, {"theta": theta})[0]

    assert len(theta) == 1 and not torch.allclose(loss(theta, 1.0), loss(theta * 0, 0.0))
    torch.testing.assert_close(loss(theta + 1e6, 1.0), loss(theta * 0, 0.0))


# Training


@pytest.mark.parametrize(("name", "momentum"), [("mlp", 0.0), ("resnet8", 0.9)])
def test_r5_active_channels_only_shrink(name: str, momentum: float) -> None:
    part = importance_structured(model(name), gamma=0.7)
    carrier = carrier_of(part)
    device = Client.of(algorithm_of(part, momentum=momentum, weight_decay=0.01 if momentum else 0.0))
    payload = payload_of(part)
    first = device.begin(payload)
    assert all(
        bool((carrier.score(group, payload) >= theta).all())
        for group, theta in zip(carrier.groups, payload[THETA], strict=True)
    ), "training starts with every channel that was sent"
    dropped = 0
    for was, now in itertools.pairwise(
        device.walk(device.begin(raised(part, 0.3)), batches_of(part.spec, 5), LR)
    ):
        for number, group in enumerate(carrier.groups):
            theta = was["gate.theta"][number]
            assert torch.equal(theta, now["gate.theta"][number])
            before, after = (
                carrier.score(group, {p.name: state[f"weights.{p.name}"] for p in group.scored}) >= theta
                for state in (was, now)
            )
            assert not (after & ~before).any()
            dropped += int((before & ~after).sum())
            for p in group.own:
                old, new = (state[f"weights.{p.name}"].movedim(p.dim, 0) for state in (was, now))
                gone = p.positions[(~before).numpy()].reshape(-1)
                assert torch.equal(old[gone], new[gone])
    assert dropped > 0, "the rate is high enough to drop something"
    assert first["gate.theta"].shape == (len(carrier.groups),)


def test_r5_statistics_of_a_dropped_channel_still_describe_it() -> None:
    part = resnet()
    device = Client.of(algorithm_of(part, remask=True))
    *_, last = device.walk(device.begin(raised(part)), batches_of(part.spec, 3), 0.0)
    *_, plain = device.walk(device.begin(payload_of(part)), batches_of(part.spec, 3), 0.0)
    name = "weights.stem.bn.running_var"
    torch.testing.assert_close(last[name], plain[name])


@pytest.mark.parametrize("name", mostly_slow(["mlp", "resnet8"], ["mlp"]))
def test_r5_switched_off_it_is_sgd_on_the_slice_in_every_byte(name: str) -> None:
    part = importance_structured(model(name), gamma=0.6)
    off = algorithm_of(part, remask=False, bias=False)
    plain = sgd(Objective.of(part), batch=BATCH, momentum=0.0, weight_decay=0.0)
    ours, theirs = (algorithm.phases[0].function for algorithm in (off, plain))
    assert to_onnx(capture(ours)) == to_onnx(capture(theirs))


def test_r5_the_four_settings_of_the_switches_give_four_results() -> None:
    part, found = resnet(), set()
    for remask, bias in itertools.product((True, False), repeat=2):
        device = Client.of(algorithm_of(part, remask=remask, bias=bias))
        *_, last = device.walk(device.begin(raised(part, 0.2)), batches_of(part.spec, 2), LR)
        found.add(last["weights.stem.conv.weight"].numpy().tobytes())
    assert len(found) == 4


@pytest.mark.parametrize("name", mostly_slow(["mlp", "resnet8", "bilstm", "Grouped"], ["mlp"]))
def test_r5_the_exported_step_equals_torch(name: str) -> None:
    part = importance_structured(
        model(name), gamma=0.5, measure="rms" if name in ("resnet8", "Grouped") else "mean"
    )
    step = algorithm_of(part, momentum=0.5).phases[0].function
    assert verify(step, to_onnx(capture(step)), seed=3).worst <= 1e-4


# Rounds


@pytest.mark.slow
def test_r5_a_round_on_the_device_equals_the_round_in_torch(tmp_path: Path) -> None:
    part = importance_structured(small_net(), gamma=0.6)
    bundle = bundle_of(part, "tier", steps=4, lr=LR)
    arrays = arrays_of(part.spec)
    rng = np.random.default_rng(1)
    later = {name: array + 0.2 * rng.random(array.shape, np.float32) for name, array in arrays.items()}
    data = local_data(part.spec, 21, seed=5)
    assert part.regions(later) != part.regions(arrays), "other channels, in the same bundle"
    for weights in (arrays, later):
        placement = part.place(weights, 2)
        update = train_on_device(bundle, blobs_for(bundle, placement, weights), data, 11, tmp_path)
        batches = iter(drawn_batches(data, 11, 4))

        def feed(_: object, __: int, batches=batches) -> Tensors:
            return dict(zip(("batch.0.x", "batch.0.y"), next(batches), strict=True))

        payload = as_tensors(placement.payload)
        expected = run_round(algorithm_of(part, steps=4, lr=LR), payload, feed).update
        assert update.keys() == expected.keys() == placement.regions.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(update[name], value.numpy(), rtol=1e-4, atol=1e-4)


def test_r5_a_mixed_federation_averages_every_entry_over_its_holders() -> None:
    part = resnet()
    spec, arrays, rng = part.spec, arrays_of(part.spec), np.random.default_rng(3)
    tiers = (part, importance_structured(spec, gamma=0.2), OutputSide(spec, 3), importance(spec, gamma=0.3))
    aggregator = Aggregator(layout_of(arrays), weight_limit=4, device="cpu")
    uploads = []
    for tier in tiers:
        regions = tier.place(arrays, 1).regions
        update = {
            name: array + rng.standard_normal(array.shape).astype(np.float32)
            for name, array in extract(arrays, regions).items()
        }
        aggregator.add(aggregator.check(update, regions), 1)
        uploads.append((regions, as_tensors(update)))
    expected = partial_average(spec.weights, uploads)
    found = aggregator.result(arrays)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-6, atol=1e-6)
    name = "block3.conv2.weight"
    larger, smaller = (set(regions[name].positions(arrays[name].shape)) for regions, _ in uploads[:2])
    assert smaller < larger, "the smaller tier's channels are among those of the larger one"
