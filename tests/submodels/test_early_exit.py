"""ScaleFL: exits for any model, levels of depth and width, and what they are trained on (fiarse.md 3)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.algorithms.submodels.multi_exit import multi_exit
from edgefl.config import parse
from edgefl.contract.tensors import Tensors
from edgefl.data.datasets import digits
from edgefl.models.exits import Exit, ExitSpec, with_exits
from edgefl.models.losses import CROSS_ENTROPY, SquaredError
from edgefl.models.losses.exit_loss import ExitLoss, divergence
from edgefl.models.zoo.basic import mlp
from edgefl.models.zoo.catalog import build_model
from edgefl.models.zoo.resnet import resnet8, resnet18
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.setup.model import federation_model, submodel_of
from edgefl.setup.training import algorithm_of
from edgefl.submodels import catalog
from edgefl.submodels.early_exit.submodel import EarlyExit, early_exit
from edgefl.submodels.importance.strategy import maskable
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.submodel import Submodel
from edgefl.submodels.width.submodel import Width
from edgefl.wire.regions import BlockRegion, extract
from tests.invariants.embracingfl.tiny import samples, tiny, walk
from tests.rings.rows import mostly_slow
from tests.support.arrays import as_tensors, weights_of
from tests.support.errors import ModelError, refuses
from tests.support.reference import partial_average, run_round
from tests.support.regions import assert_inside

# -- exits -----------------------------------------------------------------------------------------------------


def test_exits_lie_at_the_ends_of_stages_and_leave_the_model_as_it_is() -> None:
    plain = resnet18(widths=(4, 6, 8, 10), size=8)
    spec = with_exits(plain)

    assert spec.exits == ("block2_exit", "block4_exit", "block6_exit")
    assert [unit for unit in spec.units if unit not in spec.exits] == list(plain.units)
    assert spec.units[spec.units.index("block4") + 1] == "block4_exit"
    x, _ = samples(plain, 3)
    assert torch.equal(_infer(spec.module, x), _infer(plain.module, x))
    assert spec.boundary(len(spec.units)) == plain.boundary(len(plain.units)) and spec.label == plain.label


SMALL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mlp": ({"size": 6, "hidden": (9, 7)}, ("dense1",)),
    "cnn": ({"size": 8, "classes": 5}, ("conv1", "conv2")),
    "bilstm": ({"length": 6, "vocabulary": 20, "features": 5, "hidden": 4}, ("embedding",)),
    "lstm_lm": ({"length": 5, "vocabulary": 20, "features": 6, "hidden": 5}, ("embedding",)),
    "vit": ({"size": 8, "width": 12}, ("block1", "block3", "block5")),
    "bert": ({"length": 6, "vocabulary": 20, "width": 12}, ("block1", "block2", "block3")),
    "convnext": ({"size": 16, "widths": (4, 6, 8, 10)}, ("block2", "block4", "block10")),
}


@pytest.mark.parametrize("model", mostly_slow(SMALL, list(SMALL)[:2]))
def test_any_model_gets_exits_and_trains_at_each_of_them(model: str) -> None:
    options, places = SMALL[model]
    spec = with_exits(build_model(model, **options))
    assert spec.exits == tuple(f"{place}_exit" for place in places)

    for number in range(1, len(places) + 2):
        step = sgd(Objective.of(EarlyExit(spec, number)), batch=2, steps=1).phases[0].function
        tensors = step.example(number)
        moved = step(tensors)
        assert math.isfinite(float(moved["metric.loss"]))
        for exit in spec.exits[:number]:
            name = f"state.weights.{exit}.dense.weight"
            assert not torch.equal(moved[name], tensors[name]), name


def test_an_exit_is_the_mean_over_positions_and_a_dense_layer() -> None:
    image, tokens, words = (
        with_exits(build_model(name, **SMALL[name][0])) for name in ("cnn", "vit", "lstm_lm")
    )
    features = torch.randn(2, 32, 4, 4)
    said = _exit(image, "conv1_exit").classify(features)
    torch.testing.assert_close(said, _dense(image, "conv1_exit", features.mean(dim=(2, 3))))
    features = torch.randn(2, 4, 12)
    said = _exit(tokens, "block1_exit").classify(features)
    torch.testing.assert_close(said, _dense(tokens, "block1_exit", features.mean(dim=1)))
    features = torch.randn(2, 5, 6)
    said = _exit(words, "embedding_exit").classify(features)
    assert said.shape == (2, 5, 20), "a head that speaks at every token has exits that do"


def test_training_stacks_all_exits_and_inference_has_the_last() -> None:
    spec = _spec()
    level = EarlyExit(spec, 2).suffix
    x, _ = samples(spec, 3)
    chain = nn.Sequential(spec.module.stem, spec.module.block1).eval()
    with torch.no_grad():
        first = _exit(spec, "block1_exit").classify(chain(x))
        second = _exit(spec, "block2_exit").classify(spec.module.block2.eval()(chain(x)))

    torch.testing.assert_close(_infer(level, x), second)
    with torch.no_grad():
        torch.testing.assert_close(level.eval().all_exits(x), torch.stack((first, second), dim=1))
        assert level.train()(x).shape == (3, 2, 10)


def test_places_that_cannot_have_an_exit_are_refused() -> None:
    with refuses(ModelError, model="resnet8", unit="nowhere", units=("stem", "block1", "block2", "block3")):
        with_exits(resnet8(), ("nowhere",))
    with refuses(ModelError, model="resnet8", unit="head", units=("stem", "block1", "block2", "block3")):
        with_exits(resnet8(), ("head",))
    with refuses(ModelError, model="resnet8", unit="block1", units=("stem", "block1", "block2", "block3")):
        with_exits(resnet8(), ("block1", "block1"))
    with pytest.raises(ModelError, match="has exits already"):
        with_exits(_spec())
    with refuses(ModelError, model="mlp", units=("head",)):
        with_exits(mlp(hidden=()))


# -- levels ----------------------------------------------------------------------------------------------------


def test_resnet18_full_width_levels_hold_the_shares_of_the_spec() -> None:
    plain = resnet18()
    counted = {name: plain.weights[name].numel() for name in maskable(plain)}
    total = sum(counted.values())
    assert total == 11_164_362
    held = [
        sum(size for name, size in counted.items() if name.partition(".")[0] in plain.units[:stop]) / total
        for stop in (1, 3, 5, 7, 9)
    ]
    assert [round(share, 4) for share in held] == [0.0002, 0.0134, 0.0603, 0.2482, 0.9995]

    spec = with_exits(plain)
    levels = [EarlyExit(spec, exit) for exit in (1, 2, 3, 4)]
    assert [level.share for level in levels] == [*held[1:4], 1.0], "the deepest level has the head as well"
    assert [level.suffix.state_dict().keys() <= spec.weights.keys() for level in levels] == [True] * 4


@pytest.mark.parametrize("classes", [10, 100])
def test_the_four_sizes_of_the_paper_are_the_four_exits(classes: int) -> None:
    spec = with_exits(resnet18(classes=classes))
    found = [catalog.build(spec, "early_exit", gamma=gamma) for gamma in (1 / 64, 1 / 16, 1 / 4, 1.0)]
    assert [(level.exit, level.width) for level in found if isinstance(level, EarlyExit)] == [
        (exit, 1.0) for exit in (1, 2, 3, 4)
    ]


@pytest.mark.slow
def test_gamma_chooses_the_deepest_exit_that_fits() -> None:
    spec = _spec()
    shares = [EarlyExit(spec, exit).share for exit in (1, 2, 3)]
    assert early_exit(spec, gamma=shares[1]).exit == 2
    assert early_exit(spec, gamma=shares[1] * 0.999).exit == 1

    for chosen, gamma in (
        (early_exit(spec, gamma=shares[0] / 3), shares[0] / 3),
        (early_exit(spec, exit=3, gamma=0.25), 0.25),
    ):
        assert chosen.share <= gamma and chosen.width < 1.0
        wider = EarlyExit(spec, chosen.exit, chosen.width + 1 / chosen.widest)
        assert wider.share > gamma, "one channel more would not fit"
    assert early_exit(spec, gamma=shares[0] / 3).exit == 1
    half = early_exit(spec, width=0.5, gamma=0.25)
    assert (half.exit, half.width) == (2, 0.5) or half.share <= 0.25 < EarlyExit(
        spec, half.exit + 1, 0.5
    ).share


def test_unknown_sizes_and_exits_are_refused() -> None:
    spec = _spec()
    with refuses(ModelError, gamma=1e-06, exit=1, width=0.25, smallest=...):
        early_exit(spec, gamma=1e-6)
    with refuses(ModelError, gamma=1e-06, exit=1, width=1.0, smallest=...):
        early_exit(spec, width=1.0, gamma=1e-6)
    with pytest.raises(ModelError, match=r"exits 1\.\.3 \(block1_exit, block2_exit, head\); found 0"):
        early_exit(spec, exit=0)
    with refuses(ModelError, exit=4, exits=3):
        early_exit(spec, exit=4)
    with pytest.raises(ModelError, match=r"\(0, 1\]"):
        early_exit(spec, gamma=1.5)
    with refuses(ModelError, ratio=0.0):
        early_exit(spec, width=0.0)
    with refuses(ModelError, exit=1, width=0.5, gamma=0.5):
        early_exit(spec, exit=1, width=0.5, gamma=0.5)
    with pytest.raises(ModelError, match=r"resnet8 has no early exits.*with_exits"):
        early_exit(resnet8(), exit=1)


def test_a_level_in_full_width_reads_units_and_a_narrow_one_has_a_payload() -> None:
    spec = _spec()
    arrays = weights_of(spec)
    whole, narrow = EarlyExit(spec, 2), EarlyExit(spec, 2, 0.5)
    assert whole.units == ("stem", "block1", "block1_exit", "block2", "block2_exit")
    assert not whole.place(arrays, 1).payload and set(whole.place(arrays, 1).regions.values()) == {None}
    placed = narrow.place(arrays, 1)
    assert narrow.units == () and placed.regions.keys() == placed.payload.keys() == whole.regions.keys()
    assert_inside(placed.regions, {name: each.shape for name, each in arrays.items()})
    widths = [placed.regions[f"block{number}_exit.dense.weight"] for number in (1, 2)]
    assert widths == [BlockRegion((None, range(2))), BlockRegion((None, range(3)))]
    assert placed.regions["block2_exit.dense.bias"] is None
    for name, tensor in narrow.suffix.state_dict().items():
        assert np.array_equal(placed.payload[name], tensor.numpy()), name


def test_a_narrow_level_is_cut_as_a_width_slice() -> None:
    plain = tiny("resnet8")
    sliced = Width(plain, 0.5).regions()
    level = EarlyExit(with_exits(plain), 3, 0.5)
    assert {name: level.regions[name] for name in sliced} == dict(sliced)


def test_levels_average_where_they_overlap() -> None:
    spec = _spec()
    levels = [EarlyExit(spec, 1, 0.5), EarlyExit(spec, 2), EarlyExit(spec, 3)]
    uploads = [
        (level.regions, {name: tensor + shift for name, tensor in _local(level).items()})
        for shift, level in enumerate(levels, start=1)
    ]

    averaged = partial_average(spec.weights, uploads)

    moved = {name: averaged[name] - tensor for name, tensor in spec.weights.items()}
    torch.testing.assert_close(moved["head.dense.weight"], torch.full((10, 8), 3.0))
    torch.testing.assert_close(moved["block2_exit.dense.bias"], torch.full((10,), 2.5))
    torch.testing.assert_close(moved["block1_exit.dense.bias"], torch.full((10,), 2.0))
    wanted = torch.tensor([2.0, 2.0, 2.5, 2.5]).expand(10, 4)
    torch.testing.assert_close(moved["block1_exit.dense.weight"], wanted)


def test_an_output_side_tier_trains_the_exits_behind_its_cut() -> None:
    spec = _spec()
    part = OutputSide(spec, spec.units.index("block2"))
    x, y = samples(spec, 4)
    boundary = torch.relu(torch.randn(4, *part.boundary.shape))
    grads = gradient(Objective.of(part), dict(spec.weights), {"batch.0.x": boundary, "batch.0.y": y})[2]
    assert float(grads["block2_exit.dense.weight"].abs().sum()) > 0
    assert not any(name.startswith("block1_exit") for name in grads)
    assert x.shape[0] == len(y)


def test_a_width_slice_of_a_model_with_exits_is_refused() -> None:
    step = sgd(Objective.of(Width(_spec(), 0.5)), batch=2).phases[0].function
    with refuses(ModelError, features=2):
        step(step.example(0))


def test_a_federation_file_names_the_model_the_levels_and_the_algorithm() -> None:
    options = {"base": "resnet8", "widths": [4, 6, 8], "after": ["block2"]}
    tables = {
        "model": {"name": "edgefl.models.exits:early_exits", "options": options},
        "algorithm": {"name": "edgefl.algorithms.submodels.multi_exit:multi_exit", "kd_weight": 0.05},
        "tiers": {"strong": {"kind": "early_exit"}, "weak": {"kind": "early_exit", "gamma": 0.1}},
    }
    federation = parse(tables, source="the test")
    spec = federation_model(federation, digits())
    strong, weak = (submodel_of(spec, tier, table) for tier, table in federation.tiers.items())
    assert spec.units == ("stem", "block1", "block2", "block2_exit", "block3", "head")
    assert strong.identity["exit"] == 2 and strong.identity["width"] == 1.0
    assert isinstance(weak, EarlyExit) and weak.exit == 1 and 0.05 < weak.share <= 0.1
    assert algorithm_of(federation, weak).hyper == {"lr": 0.05, "kd_weight": 0.05}


# -- what is trained -------------------------------------------------------------------------------------------


def test_the_loss_weighs_exit_j_by_j_and_normalises() -> None:
    out, y = torch.randn(5, 3, 4), torch.tensor([0, 1, 2, 3, 0])
    loss = ExitLoss(CROSS_ENTROPY, rank=2)
    each = [nn.functional.cross_entropy(out[:, j], y, reduction="none") for j in range(3)]
    torch.testing.assert_close(loss.each(out, y), each[0] / 6 + each[1] / 3 + each[2] / 2)
    assert torch.equal(loss.correct(out, y), (out[:, -1].argmax(1) == y).float())
    torch.testing.assert_close(loss.each(out[:, -1], y), each[2])
    torch.testing.assert_close(loss.each(out[:, 2:], y), each[2])


def test_distillation_adds_the_divergence_from_the_last_exit() -> None:
    last, early = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    # softmax([1, 0]) against one half each: p log(2 p), summed.
    p = 1 / (1 + math.exp(-1.0))
    wanted = p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))
    assert float(divergence(last, early)) == pytest.approx(wanted, rel=1e-6)

    out, y = torch.stack((early, last), dim=1), torch.tensor([0])
    single = torch.tensor([[[0.0], [-3.0]]])
    plain = float(ExitLoss(CROSS_ENTROPY, 2).each(out, y))
    assert float(ExitLoss(CROSS_ENTROPY, 2, 0.6).each(single, y)) == pytest.approx(
        plain + 0.2 * wanted, rel=1e-6
    )
    assert float(ExitLoss(CROSS_ENTROPY, 2, 0.6).each(out, y)) == pytest.approx(
        plain + 0.6 * wanted / 3, rel=1e-6
    )


def test_the_last_exit_learns_nothing_from_being_the_teacher() -> None:
    out = torch.randn(4, 3, 5, requires_grad=True)
    y = torch.tensor([0, 1, 2, 3])
    found = []
    for weight in (0.0, 2.0):
        (grad,) = torch.autograd.grad(ExitLoss(CROSS_ENTROPY, 2, weight).each(out, y).sum(), out)
        found.append(grad)
    assert torch.equal(found[0][:, -1], found[1][:, -1])
    assert not torch.allclose(found[0][:, :-1], found[1][:, :-1])


def test_only_losses_over_classes_are_distilled() -> None:
    with pytest.raises(ModelError, match="SquaredError has none"):
        ExitLoss(SquaredError(), 2, 0.1)
    with refuses(ModelError, kd_weight=-1.0):
        ExitLoss(CROSS_ENTROPY, 2, -1.0)


@pytest.mark.slow
def test_without_distillation_the_algorithm_is_sgd() -> None:
    spec = _spec()
    objective = Objective.of(EarlyExit(spec, 3))
    x, y = samples(spec, 8)

    def update(algorithm: Any, **hyper: float) -> Tensors:
        return run_round(algorithm, spec.weights, walk(x, y, 4), hyper=hyper).update

    plain = update(sgd(objective, batch=4, steps=2))
    none = multi_exit(objective, batch=4, steps=2)
    some = multi_exit(objective, batch=4, steps=2, kd_weight=0.5)
    assert not none.schedule(0, 8)
    assert [some.schedule(position, 8)["kd_weight"] for position in range(4)] == [0.0, 0.0, 0.5, 0.5]
    assert none.hyper == {"lr": 0.05} and some.hyper == {"lr": 0.05, "kd_weight": 0.5}
    assert _equal(update(none), plain) and _equal(update(some, kd_weight=0.0), plain)
    assert not _equal(update(some), plain)
    own = with_exits(tiny("resnet8"), kd_weight=0.5)
    static = sgd(Objective.of(EarlyExit(own, 3)), batch=4, steps=2)
    by_default = multi_exit(Objective.of(EarlyExit(own, 3)), batch=4, steps=2)
    found, distilled = run_round(static, spec.weights, walk(x, y, 4)).update, update(some)
    assert found.keys() == distilled.keys()
    for name, tensor in distilled.items():
        torch.testing.assert_close(found[name], tensor)
    assert by_default.hyper == some.hyper
    with pytest.raises(ModelError, match="early exits, and this one has none"):
        multi_exit(Objective.of(OutputSide(resnet8(), 0)))


# -- helpers ---------------------------------------------------------------------------------------------------


def _spec() -> ExitSpec:
    return with_exits(tiny("resnet8"))


def _exit(spec: ExitSpec, name: str) -> Exit:
    found = spec.module.get_submodule(name)
    assert isinstance(found, Exit)
    return found


def _dense(spec: ExitSpec, name: str, pooled: Tensor) -> Tensor:
    return pooled @ spec.weights[f"{name}.dense.weight"].T + spec.weights[f"{name}.dense.bias"]


@torch.no_grad()
def _infer(module: nn.Sequential, x: Tensor) -> Tensor:
    out: Tensor = module.eval()(x)
    return out


def _local(part: Submodel) -> Tensors:
    """What a device starts from."""
    arrays = weights_of(part.spec)
    local = extract(arrays, part.place(arrays, 1).regions)
    return as_tensors(local)


def _equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
