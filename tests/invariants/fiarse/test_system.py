"""FIARSE invariants 27, 29 and 32: bytes on the wire, the sparse artifact, and a federation that repeats."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

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
from edgefl_server.coordinator.states import Answered, DeviceHello, ModelReady, Open, OpenRound, Rules
from tests.invariants.fiarse.tiny import framework_default
from tests.invariants.fiarse.training import (
    BATCH,
    CLASSES,
    Client,
    algorithm_of,
    arrays_of,
    batches_of,
    blobs_for,
    run_in,
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
def test_inv29_the_graph_on_a_sparse_payload_is_the_masked_model(
    gamma: float,
) -> None:
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
    while isinstance(actions[-1], Open):
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
