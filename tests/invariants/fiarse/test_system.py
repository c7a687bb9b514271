"""FIARSE invariants 27, 29 and 32: bytes on the wire, the sparse artifact, and a federation that repeats."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgefl.contract.tensors import Tensors
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.models.zoo.resnet import resnet8
from edgefl.submodels.importance.carrier import MASK, THETA, VALUES
from edgefl.submodels.importance.submodel import Importance, importance
from edgefl.wire import bits, tensors
from edgefl.wire.regions import extract
from edgefl.wire.tensors import Arrays
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from edgefl_server.coordinator import machine as coordinator
from edgefl_server.coordinator import states
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import Answered, DeviceHello, ModelReady, OpenRound, Rules, StartRound
from tests.invariants.fiarse.tiny import framework_default
from tests.invariants.fiarse.training import (
    BATCH,
    CLASSES,
    LR,
    STEPS,
    Client,
    algorithm_of,
    arrays_of,
    batches_of,
    blobs_for,
    bundle_of,
    client,
    drawn_batches,
    run_in,
    simulate,
    small_bundle,
    small_net,
    train_on_device,
)
from tests.parity.rounds import local_data
from tests.rings.rows import mostly_slow

# 27. Bytes


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return resnet8(bn="static", seed=1)


def content_bytes(blob: bytes) -> int:
    """Bytes of a safetensors file without its header."""
    return len(blob) - 8 - int.from_bytes(blob[:8], "little")


def dense_scalars(submodel: Importance) -> int:
    weights = submodel.spec.weights
    return sum(weights[name].numel() for name in submodel.carrier.dense)


@pytest.mark.sample(2)
@pytest.mark.parametrize("gamma", [1 / 64, 0.04, 1 / 4, 0.64])
def test_inv27_the_payload_is_the_masked_model(spec: ModelSpec, gamma: float) -> None:
    submodel, weights = importance(spec, gamma=gamma), arrays_of(spec)
    placement = submodel.place(weights, 1)
    loaded = tensors.load(tensors.dump(placement.payload, placement.masks))
    assert loaded.keys() == placement.payload.keys()
    for name, array in placement.payload.items():
        assert loaded[name].dtype == array.dtype and loaded[name].tobytes() == array.tobytes()

    state = Client.of(algorithm_of(submodel)).begin(loaded)
    found = submodel.cut_of(weights)
    for name, expected in found.apply(weights).items():
        assert state[f"weights.{name}"].numpy().tobytes() == expected.tobytes(), name
    for name, mask in found.masks.items():
        assert np.array_equal(state[f"gate.mask.{name}"].numpy(), mask)


@pytest.mark.parametrize(
    ("gamma", "smaller"),
    [(1 / 64, "gaps"), (0.04, "gaps"), (1 / 16, "gaps"), (1 / 4, "packed"), (0.64, "packed")],
)
def test_inv27_the_bytes_down_are_those_of_the_formula(spec: ModelSpec, gamma: float, smaller: str) -> None:
    """Mask and values as in fiarse.md 8.3, 4 bytes for each dense scalar and, of the container, each tensor's threshold."""
    submodel = importance(spec, gamma=gamma)
    placement = submodel.place(arrays_of(spec), 1)
    blob = tensors.dump(placement.payload, placement.masks)
    d, k = submodel.carrier.entries, submodel.kept
    mask = bits.unpack(placement.payload[MASK], d)
    by_form = {"packed": bits.packed_bytes(d) + 4 * k, "gaps": bits.gap_bytes(bits.pack(mask), d) + 4 * k}
    assert k == int(mask.sum()) == int(gamma * d + 1e-9)
    assert min(by_form, key=lambda form: by_form[form]) == smaller
    thresholds = 4 * len(submodel.carrier.maskable)
    assert content_bytes(blob) == by_form[smaller] + 4 * dense_scalars(submodel) + thresholds
    assert placement.payload[THETA].nbytes == thresholds


@pytest.mark.parametrize("gamma", [1 / 64, 1 / 4])
def test_inv27_the_upload_is_values_without_a_mask(spec: ModelSpec, gamma: float) -> None:
    submodel = importance(spec, gamma=gamma)
    client = Client.of(algorithm_of(submodel))
    placement = submodel.place(arrays_of(spec), 1)
    state = client.begin(placement.payload)
    update = {name: tensor.numpy() for name, tensor in client.update(state).items()}
    assert update.keys() == placement.regions.keys() == {VALUES, *submodel.carrier.dense}
    assert update[VALUES].shape == (submodel.kept,) and update[VALUES].dtype == np.float32
    assert content_bytes(tensors.dump(update)) == 4 * submodel.kept + 4 * dense_scalars(submodel)
    assert update[VALUES].tobytes() == placement.payload[VALUES].tobytes(), (
        "the same values in the same order"
    )


def test_inv27_at_full_size_no_mask_travels_at_all(spec: ModelSpec) -> None:
    submodel, weights = importance(spec, gamma=1.0), arrays_of(spec)
    placement = submodel.place(weights, 1)
    assert not placement.masks and not placement.payload
    assert submodel.units == tuple(name for name, unit in spec.module.named_children() if unit.state_dict())
    assert placement.regions == dict.fromkeys(weights)
    algorithm = algorithm_of(submodel)
    ports = {name.partition(".")[2]: port for name, port in algorithm.start.inputs.items()}
    down = 4 * sum(int(np.prod(port.shape)) for port in ports.values())
    assert ports.keys() == weights.keys()
    assert down == 4 * sum(array.size for array in weights.values())


# 29. The sparse artifact


@pytest.mark.parametrize("gamma", [0.3, 1.0])
def test_inv29_the_graph_on_a_sparse_payload_is_the_masked_model(gamma: float) -> None:
    """The exported ``evaluate`` tells a row's loss under a label: asked for each label, its log-probabilities."""
    submodel, weights = importance(small_net(), gamma=gamma), arrays_of(small_net())
    evaluate = run_in("onnx", algorithm_of(submodel).evaluate)
    sent = submodel.place(weights, 1).payload or weights
    feeds = {f"weights.{name}": torch.from_numpy(array) for name, array in sent.items()}
    [(x, _)] = batches_of(submodel.spec, 1)
    found = np.zeros((BATCH, CLASSES))
    for row, label in np.ndindex(BATCH, CLASSES):
        only = (torch.arange(BATCH) == row).float()
        asked = {"batch.0.x": x, "batch.0.y": torch.full((BATCH,), label), "batch.0.mask": only}
        found[row, label] = -evaluate(feeds | asked)["metric.loss_sum"]

    masked = {n: torch.from_numpy(a) for n, a in submodel.cut_of(weights).apply(weights).items()}
    logits = torch.func.functional_call(submodel.spec.module.eval(), masked, (x,))
    np.testing.assert_allclose(found, torch.log_softmax(logits, dim=1).numpy(force=True), atol=1e-5)
    whole = submodel.spec.module.eval()(x).log_softmax(dim=1).numpy(force=True)
    assert (np.abs(found - whole).max() > 0.05) == (gamma < 1), "the mask makes a difference"


# 31. Liveness of the artifact


def mlp() -> ModelSpec:
    return framework_default(build_model("mlp", size=14, hidden=(64,)))


@pytest.mark.parametrize(("min_keep", "alive"), mostly_slow([(0, False), (32, True)], [(32, True)]))
def test_inv31_a_dead_artifact_ignores_its_input_and_a_guard_revives_it(min_keep: int, alive: bool) -> None:
    submodel = importance(mlp(), gamma=1 / 64, min_keep=min_keep)
    weights = arrays_of(submodel.spec)
    payload, algorithm = submodel.place(weights, 1).payload, algorithm_of(submodel)
    named = {f"weights.{name}": torch.from_numpy(array) for name, array in payload.items()}
    start, train, evaluate = (
        run_in("onnx", function)
        for function in (algorithm.start, algorithm.phases[0].function, algorithm.evaluate)
    )
    client = Client(start, train, algorithm.finish)
    (x, y), (other, _) = batches_of(submodel.spec, 2)
    asked = named | {"batch.0.y": y, "batch.0.mask": torch.ones(BATCH)}
    losses = [evaluate(asked | {"batch.0.x": rows})["metric.loss_sum"] for rows in (x, other)]
    assert bool(losses[0] != losses[1]) == alive, "the logits depend on the input"
    state = client.begin(payload)
    moved, _ = client.step(state, (x, y))
    first = "weights.dense1.dense.weight"
    assert bool((moved[first] != state[first]).any()) == alive, "a gradient reaches the first layer"


# 32. Determinism


@dataclass(frozen=True)
class History:
    """What two runs of a federation must share."""

    participants: tuple[tuple[str, ...], ...]
    masks: tuple[bytes, ...]
    final: str


SIZES = (0.3, 1.0)
FLEET = [(f"size-{gamma:g}-{number}", gamma) for gamma in SIZES for number in range(3)]


def federation(seed: int, folder: Path) -> History:
    """Two rounds of three of six devices of two sizes: the coordinator chooses, the device runtime trains."""
    spec = small_net(seed)
    weights = arrays_of(spec)
    submodels = {f"size-{gamma:g}": importance(spec, gamma=gamma) for gamma in SIZES}
    tiers = tuple(TierRule(tier, (f"{tier}-*",)) for tier in submodels)
    rules = Rules(run="run", seed=seed, rounds=2, tiers=tiers, fraction=0.5, min_devices=len(FLEET))
    state = coordinator.initial("0", now=0.0)
    participants, masks = [], []
    actions: states.Actions = ()
    for name, _ in FLEET:
        state, actions = coordinator.step(rules, state, DeviceHello(name, 0, 21), now=1.0)
    while isinstance(actions[-1], StartRound):
        opened = actions[-1].round
        participants.append(tuple(sorted(opened.assignments)))
        placed = {tier: submodel.place(weights, opened.number) for tier, submodel in submodels.items()}
        masks += [placed[tier].payload[MASK].tobytes() for tier in sorted(placed) if placed[tier].payload]
        weights = one_round(opened, submodels, weights, folder)
        for name in opened.assignments:
            state, _ = coordinator.step(rules, state, Answered(name, accepted=True), now=1.0)
        state, actions = coordinator.step(rules, state, ModelReady(f"{opened.number}"), now=1.0)
    return History(tuple(participants), tuple(masks), hashlib.sha256(tensors.dump(weights)).hexdigest())


def one_round(opened: OpenRound, submodels: dict[str, Importance], weights: Arrays, folder: Path) -> Arrays:
    aggregator = Aggregator(layout_of(weights), weight_limit=len(opened.assignments), device="cpu")
    for name, assignment in opened.assignments.items():
        submodel = submodels[assignment.tier]
        placement, bundle = submodel.place(weights, opened.number), small_bundle(submodel.gamma)
        data = local_data(submodel.spec, 21, seed=[other for other, _ in FLEET].index(name))
        place = folder / f"{name}-{opened.number}"
        update = train_on_device(bundle, blobs_for(bundle, placement, weights), data, assignment.seed, place)
        aggregator.add(aggregator.check(update, placement.regions), 1)
    return aggregator.result(weights)


@pytest.mark.slow
def test_inv32_equal_seeds_give_equal_runs(tmp_path: Path) -> None:
    first, again = federation(3, tmp_path / "first"), federation(3, tmp_path / "again")
    assert first == again
    assert [len(names) for names in first.participants] == [3, 3]
    assert len(first.masks) == 2 and first.masks[0] != first.masks[1], "the masks follow the weights"
    other = federation(4, tmp_path / "other")
    assert other.final != first.final and other.masks != first.masks
    assert other.participants != first.participants


def test_inv32_a_placement_is_a_pure_function_of_the_weights(spec: ModelSpec) -> None:
    weights = arrays_of(spec)
    placements = [importance(spec, gamma=1 / 16).place(weights, number) for number in (1, 2)]
    one, other = (tensors.dump(placement.payload, placement.masks) for placement in placements)
    assert one == other
    held = [extract(weights, placement.regions)[VALUES].tobytes() for placement in placements]
    assert held[0] == held[1] == placements[0].payload[VALUES].tobytes()


# -- FIARSE invariants 16 to 18 --------------------------------------------------------------------------------


GAMMA, SEED = 0.3, 11
NAN = float("nan")
OPTIMIZERS = [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"momentum": 0.9, "freeze_dropped": False}]


@pytest.fixture(scope="module")
def submodel() -> Importance:
    return importance(small_net(), gamma=GAMMA)


# 16. Poison


def poisoned(state: Tensors, poison: float) -> Tensors:
    """The same state with ``poison`` in every entry that was not sent."""
    masks = {name.removeprefix("gate.mask."): m for name, m in state.items() if name.startswith("gate.mask.")}
    assert sum(bool((~mask).any()) for mask in masks.values()) >= 3
    return state | {
        f"weights.{name}": torch.where(mask, state[f"weights.{name}"], poison) for name, mask in masks.items()
    }


def same(one: Tensors, other: Tensors) -> bool:
    """Equal in every bit, so that NaN equals NaN."""
    return all(one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one | other)


def rounds(device: Client, submodel: Importance, poison: float) -> Iterator[tuple[Tensors, Tensors]]:
    """(state, metrics) of a clean and of a poisoned round, step by step."""
    clean = device.begin(submodel.place(arrays_of(submodel.spec), 1).payload)
    other = poisoned(clean, poison)
    metrics, told = {}, {}
    yield clean | metrics, other | told
    for batch in batches_of(submodel.spec, 3):
        (clean, metrics), (other, told) = device.step(clean, batch, LR), device.step(other, batch, LR)
        yield clean | metrics, other | told


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("engine", "options", "poison"),
    mostly_slow(
        [("torch", options, poison) for options in OPTIMIZERS for poison in (1e6, NAN)]
        + [("onnx", OPTIMIZERS[0], NAN), ("onnx", OPTIMIZERS[1], NAN), ("onnx", OPTIMIZERS[2], 1e6)],
        [("torch", options, poison) for options in OPTIMIZERS for poison in (1e6, NAN)],
    ),
)
def test_inv16_what_was_not_sent_changes_nothing_and_is_not_changed(
    submodel: Importance, engine: str, options: dict[str, Any], poison: float
) -> None:
    device = client(engine, GAMMA, **options)
    for clean, other in rounds(device, submodel, poison):
        assert clean.get("loss") == other.get("loss") and clean.get("correct") == other.get("correct")
        assert same(device.update(clean), device.update(other))
        for name in submodel.carrier.maskable:
            unsent = other[f"weights.{name}"][~clean[f"gate.mask.{name}"]]
            assert same({"x": unsent}, {"x": torch.full_like(unsent, poison)}), (
                "Delta outside M0 is exactly 0"
            )
        assert same(
            {n: clean[f"weights.{n}"] for n in submodel.carrier.dense},
            {n: other[f"weights.{n}"] for n in submodel.carrier.dense},
        )


# 17. What the result depends on


def bits_of(update: Arrays) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in update.items()}


def test_inv17_a_result_depends_on_its_inputs_only(submodel: Importance, tmp_path: Path) -> None:
    weights, bundle = arrays_of(submodel.spec), small_bundle(GAMMA)
    masks = submodel.cut_of(weights).masks
    elsewhere = {
        name: np.where(masks[name], array, array / 2) if name in masks else array
        for name, array in weights.items()
    }
    assert any(not np.array_equal(weights[name], elsewhere[name]) for name in weights)

    def update(name: str, source: Arrays, seed: int = SEED, samples: int = 5) -> dict[str, bytes]:
        published = blobs_for(bundle, submodel.place(source, 1), source)
        drawn = local_data(submodel.spec, 21, seed=samples)
        return bits_of(train_on_device(bundle, published, drawn, seed, tmp_path / name))

    assert blobs_for(bundle, submodel.place(weights, 1), weights) == blobs_for(
        bundle, submodel.place(elsewhere, 2), elsewhere
    )
    first = update("first", weights)
    assert first == update("again", elsewhere)
    assert first != update("other seed", weights, seed=SEED + 1)
    assert first != update("other data", weights, samples=6)
    moved = {name: array * np.float32(1.01) for name, array in weights.items()}
    assert first != update("other payload", moved)


# What is not trained travels down only


def half_frozen() -> ModelSpec:
    """The small net with a body that is not trained, and a batch norm with moving statistics beside it."""
    spec = small_net()
    spec.module.body.requires_grad_(False)
    spec.module.stem[1] = BatchNorm(4, mode="global")
    spec.module.stem[1].bias.requires_grad_(False)
    return spec


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_untrained_parameters_travel_down_only(tmp_path: Path, options: dict[str, Any]) -> None:
    submodel = importance(half_frozen(), gamma=GAMMA)
    frozen = {"stem.1.bias", "body.0.weight", "body.1.weight", "body.1.bias"}
    statistics = {"stem.1.running_mean", "stem.1.running_var"}
    weights, data = arrays_of(submodel.spec), local_data(submodel.spec, 21, seed=5)
    assert frozen | statistics < submodel.carrier.dense.keys()

    placement = submodel.place(weights, 1)
    bundle = bundle_of(submodel, "weak", steps=STEPS, lr=LR, **options)
    update = train_on_device(bundle, blobs_for(bundle, placement, weights), data, SEED, tmp_path)

    assert frozen < placement.payload.keys()
    assert update.keys() == placement.regions.keys() == {VALUES, "stem.1.weight", *statistics}
    assert all(np.abs(update[name] - weights[name]).max() > 1e-4 for name in statistics)


# 18. The sparse client and the dense simulation


@pytest.mark.parametrize("strategy", mostly_slow(["model", "layer"], ["model"]))
def test_inv18_a_sparse_payload_equals_the_dense_simulation(tmp_path: Path, strategy: str) -> None:
    submodel = importance(small_net(), gamma=GAMMA, strategy=strategy)
    bundle = small_bundle(GAMMA) if strategy == "model" else bundle_of(submodel, "weak", steps=STEPS, lr=LR)
    weights, data = arrays_of(submodel.spec), local_data(submodel.spec, 21, seed=5)
    placement = submodel.place(weights, 1)
    found = submodel.cut_of(weights)

    update = train_on_device(bundle, blobs_for(bundle, placement, weights), data, SEED, tmp_path)

    after = simulate(submodel.spec, found.masks, found.theta, drawn_batches(data, SEED, STEPS), LR)
    dense = {name: tensor.numpy() for name, tensor in after.items()}
    expected = extract(dense, placement.regions)
    before = extract(weights, placement.regions)
    assert update.keys() == expected.keys() == {VALUES, *submodel.carrier.dense}
    for name, value in expected.items():
        np.testing.assert_allclose(update[name], value, atol=1e-6, rtol=1e-6, err_msg=name)
        assert np.abs(value - before[name]).max() > 1e-3, "it has trained"
    for name, mask in found.masks.items():
        assert dense[name][~mask].tobytes() == weights[name][~mask].tobytes()


@pytest.mark.slow
def test_inv18_a_device_that_holds_everything_equals_plain_training(tmp_path: Path) -> None:
    submodel = importance(small_net(), gamma=1.0)
    bundle = small_bundle(1.0)
    weights, data = arrays_of(submodel.spec), local_data(submodel.spec, 21, seed=5)
    update = train_on_device(
        bundle, blobs_for(bundle, submodel.place(weights, 1), weights), data, SEED, tmp_path
    )
    expected = simulate(submodel.spec, {}, {}, drawn_batches(data, SEED, STEPS), LR)
    assert update.keys() == weights.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(update[name], tensor.numpy(), atol=1e-6, rtol=1e-6, err_msg=name)
