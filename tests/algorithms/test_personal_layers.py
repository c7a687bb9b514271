"""FedPer, FedRep and FedBN: the papers' equations in plain PyTorch, options, refusals, and codecs of the shared part."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from edgefl import algorithms
from edgefl.config import parse
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ConfigError
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.setup.training import algorithm_of, tier_sizes
from edgefl.submodels import catalog as kinds
from tests.support.reference import Client, draw, drawn, federated, run_round, selection

CLASSES, FEATURES, BATCH, SEED = 3, 4, 6, 11
HEAD = ("head.weight", "head.bias")
NORM = ("hidden.norm.weight", "hidden.norm.bias", "hidden.norm.running_mean", "hidden.norm.running_var")
PRIVATE: Mapping[str, tuple[str, ...]] = {"fedper": HEAD, "fedrep": HEAD, "fedbn": NORM}


def units(norm: Callable[[int], nn.Module], dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = OrderedDict(dense=nn.Linear(5, 4), norm=norm(4), relu=nn.ReLU())
    first = nn.Sequential(OrderedDict(dense=nn.Linear(FEATURES, 5), relu=nn.ReLU()))
    module = nn.Sequential(OrderedDict(first=first, hidden=nn.Sequential(hidden), head=nn.Linear(4, CLASSES)))
    return module.to(dtype)


def model(norm: Callable[[int], nn.Module] = BatchNorm, dtype: torch.dtype = torch.float32) -> ModelSpec:
    return ModelSpec("small", units(norm, dtype), TensorSpec((FEATURES,)), CLASSES)


def objective(
    norm: Callable[[int], nn.Module] = BatchNorm, kind: str = "output_side", **size: Any
) -> Objective:
    return Objective.of(kinds.build(model(norm), kind, **size))


def clients(dtype: torch.dtype = torch.float64) -> list[Client]:
    """Three users whose classes and inputs differ."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(3):
        x = torch.randn((9 + number, FEATURES), generator=generator, dtype=dtype) + number
        made.append(Client(number, x, torch.randint(0, 1 + number, (9 + number,), generator=generator)))
    return made


# -- the papers' equations -------------------------------------------------------------------------------------


class Oracle:
    """Whole federations in plain PyTorch: modules, optimizers and loops, and nothing of edgefl's algorithms.

    Args:
        private: Names in ``state_dict`` of what stays on a device.
        phases: (names that move, number of steps), in order.
        momentum: Momentum of torch's SGD, with a new optimizer for each phase.
    """

    def __init__(
        self, private: Sequence[str], phases: Sequence[tuple[set[str], int]], lr: float, momentum: float
    ) -> None:
        self.private, self.phases, self.lr, self.momentum = private, phases, lr, momentum
        self.module = units(nn.BatchNorm1d, torch.float64)
        self.own: dict[int, Tensors] = {}

    def state(self) -> Tensors:
        state = self.module.state_dict()
        return {name: state[name].clone() for name in state if not name.endswith("num_batches_tracked")}

    def round(self, number: int, chosen: Sequence[Client]) -> None:
        sent = [self.train(client, number) for client in chosen]
        mean = {name: torch.stack([each[name] for each in sent]).mean(0) for name in sent[0]}
        self.module.load_state_dict(mean, strict=False)

    def train(self, client: Client, number: int) -> Tensors:
        """Train one device, store its private part, and return the shared one."""
        local = copy.deepcopy(self.module).train()
        local.load_state_dict(self.own.get(client.number, {}), strict=False)
        step = 0
        for moving, steps in self.phases:
            parameters = [tensor for name, tensor in local.named_parameters() if name in moving]
            optimizer = torch.optim.SGD(parameters, self.lr, self.momentum)
            for _ in range(steps):
                rows = draw(len(client.x), BATCH, (SEED, client.number, number, step, 0))
                fixed = {name: buffer.clone() for name, buffer in local.named_buffers() if name not in moving}
                local.zero_grad()
                nn.functional.cross_entropy(local(client.x[rows]), client.y[rows]).backward()
                optimizer.step()
                local.load_state_dict(fixed, strict=False)
                step += 1
        state = {name: tensor.clone() for name, tensor in local.state_dict().items()}
        self.own[client.number] = {name: state[name] for name in self.private}
        return {name: state[name] for name in self.state() if name not in self.private}


EVERYTHING = set(units(BatchNorm, torch.float64).state_dict())


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize(("fraction", "momentum"), [(1.0, 0.0), (2 / 3, 0.5)])
def test_rounds_equal_the_papers_equations(name: str, fraction: float, momentum: float) -> None:
    """Shared and private tensors of every device, in rounds that take all devices and in rounds that take two of three."""
    private, options = set(PRIVATE[name]), {"head_steps": 3} if name == "fedrep" else {}
    phases = [(EVERYTHING, 2)] if name != "fedrep" else [(private, 3), (EVERYTHING - private, 2)]
    oracle, users, rounds = Oracle(PRIVATE[name], phases, 0.1, momentum), clients(), 4
    algorithm = algorithms.build(
        name, objective(), batch=BATCH, steps=2, lr=0.1, momentum=momentum, **options
    )

    done = list(federated(algorithm, oracle.state(), users, rounds=rounds, seed=SEED, fraction=fraction))

    for number in range(1, rounds + 1):
        chosen = selection(SEED, number, 3, round(3 * fraction))
        oracle.round(number, [users[at] for at in chosen])
        for key, expected in oracle.state().items():
            torch.testing.assert_close(done[number - 1].weights[key], expected, rtol=1e-9, atol=1e-12)
    for number, own in oracle.own.items():
        carry = done[-1].carries[number]
        assert carry.keys() == {"begun", *(f"private.{key}" for key in own)} and carry["begun"] == 1
        for key, expected in own.items():
            torch.testing.assert_close(carry[f"private.{key}"], expected, rtol=1e-9, atol=1e-12)
    assert len({own[PRIVATE[name][0]].numpy().tobytes() for own in oracle.own.values()}) == 3


def test_no_update_holds_a_private_tensor() -> None:
    for name, private in PRIVATE.items():
        algorithm = algorithms.build(name, objective(), batch=2, steps=1)
        out = algorithm.finish(algorithm.finish.example(0))

        assert algorithm.private == set(private)
        assert {key for key in out if key.startswith("update.")} == {
            f"update.{key}" for key in EVERYTHING - set(private)
        }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_private_tensors_that_are_not_finite_are_replaced_by_the_servers(value: float) -> None:
    algorithm = algorithms.build("fedper", objective(), batch=2, steps=1)
    broken = algorithm.finish.example(0)
    broken["state.weights.head.bias"][0] = value
    carry = {name: tensor for name, tensor in algorithm.finish(broken).items() if name.startswith("carry.")}

    inputs = algorithm.start.example(1) | carry
    state = algorithm.start(inputs)

    assert carry["carry.begun"] == 0
    assert all(torch.equal(state[f"state.weights.{key}"], inputs[f"weights.{key}"]) for key in HEAD)


# -- options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("private", "found"),
    [
        (None, set(HEAD)),
        ("head", set(HEAD)),
        ("head.bias", {"head.bias"}),
        (["hidden.norm", "head"], {*NORM, *HEAD}),
        ("hidden", {*NORM, "hidden.dense.weight", "hidden.dense.bias"}),
    ],
)
def test_private_names_units_modules_and_tensors(private: str | list[str] | None, found: set[str]) -> None:
    for name in ("fedper", "fedrep"):
        assert algorithms.build(name, objective(), private=private).private == found


@pytest.mark.parametrize(
    ("norm", "norms", "count"),
    [
        (BatchNorm, "batch", 4),
        (nn.BatchNorm1d, "batch", 5),
        (lambda size: BatchNorm(size, mode="static"), "batch", 2),
        (nn.LayerNorm, "all", 2),
        (lambda size: nn.GroupNorm(2, size), "all", 2),
        (nn.RMSNorm, "all", 1),
    ],
)
def test_fedbn_keeps_parameters_and_statistics_of_norms(
    norm: Callable[[int], nn.Module], norms: str, count: int
) -> None:
    private = algorithms.build("fedbn", objective(norm), norms=norms).private

    assert len(private) == count and all(name.startswith("hidden.norm.") for name in private)


EVERY_UNIT = ["first", "hidden", "head"]


@pytest.mark.parametrize(
    ("name", "options", "norm", "message"),
    [
        (
            "fedper",
            {"private": "haed"},
            BatchNorm,
            r"no module or tensor 'haed'; name units .*first, hidden, head here",
        ),
        ("fedper", {"private": ["head", "hid"]}, BatchNorm, "no module or tensor 'hid'"),
        ("fedrep", {"private": []}, BatchNorm, r"private is \[\], and this tier trains nothing of that"),
        (
            "fedper",
            {"private": EVERY_UNIT},
            BatchNorm,
            "would keep all 10 tensors .* choose the algorithm local",
        ),
        ("fedbn", {}, nn.Identity, "the trained units have none.*set norms to 'all', .* or choose fedper"),
        ("fedbn", {}, nn.LayerNorm, "set norms to 'all'"),
        ("fedbn", {"norms": "all"}, nn.Identity, "have none .* or choose fedper, whose option private"),
        ("fedrep", {"head_steps": -1}, BatchNorm, "head_steps is -1"),
        ("fedper", {"momentum": 1.0}, BatchNorm, "momentum is 1.0"),
        ("fedbn", {"batch": 0}, BatchNorm, "batch is 0"),
        (
            "fedper",
            {"personal": 0.1},
            BatchNorm,
            "keeps a part of the model on each device.*leave out personal",
        ),
    ],
)
def test_unusable_options_name_a_remedy(
    name: str, options: Mapping[str, Any], norm: Callable[[int], nn.Module], message: str
) -> None:
    # An identity instead of a norm takes the number of channels as an argument that it ignores.
    with pytest.raises(ConfigError, match=message):
        algorithms.build(name, objective(norm), **options)


# -- tiers and codecs ------------------------------------------------------------------------------------------


def built(name: str, kind: str, codec: str = "dense", **size: Any) -> Algorithm:
    table = {"codec": {"name": codec}, "algorithm": {"name": name, "batch": 2, "steps": 2}}
    return algorithm_of(parse(table, source="the test"), kinds.build(model(), kind, **size))


@pytest.mark.parametrize("name", PRIVATE)
def test_tiers_that_train_the_private_layers_work(name: str) -> None:
    assert built(name, "output_side", cut=1).private == set(PRIVATE[name])
    assert built(name, "width", gamma=0.25).private == set(PRIVATE[name])


@pytest.mark.parametrize(
    ("name", "kind", "size", "message"),
    [
        ("fedbn", "output_side", {"cut": 2}, "the trained units have none .* let the tier train those"),
        ("fedper", "importance", {"gamma": 0.5}, "keeps whole tensors on each device"),
        (
            "fedper",
            "width",
            {"gamma": 0.25, "rolling": True},
            "keeps something of every entry on each device",
        ),
        ("fedbn", "importance_structured", {"gamma": 0.5}, "keeps something of every entry on each device"),
    ],
)
def test_tiers_that_cannot_train_them_are_refused(
    name: str, kind: str, size: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        built(name, kind, **size)


def test_a_tier_that_freezes_some_of_the_norms_is_refused() -> None:
    spec = build_model("resnet8", size=8, widths=(2, 4, 4))
    federation = parse({"algorithm": {"name": "fedbn"}}, source="the test")

    with pytest.raises(
        ConfigError, match=r"'fedbn' keeps 'block1\..* each device \(\d+ such\).* in a frozen unit"
    ):
        algorithm_of(federation, kinds.build(spec, "output_side", cut=3))


@pytest.mark.parametrize("codec", ["fedbat", "zerofl", "bifl"])
def test_codecs_with_a_training_of_their_own_are_refused(codec: str) -> None:
    with pytest.raises(ConfigError, match=f"codec '{codec}' goes with the local training .*'fedper'"):
        built("fedper", "output_side", codec)


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("codec", ["int8", "ef_signsgd", "topk"])
def test_codecs_code_the_shared_part_alone(name: str, codec: str) -> None:
    algorithm, dense = built(name, "output_side", codec), built(name, "output_side")
    weights = {key: tensor.clone() for key, tensor in model().weights.items()}
    client = clients(torch.float32)[2]

    coded, plain = (run_round(each, weights, drawn(each, client, SEED, 1)) for each in (algorithm, dense))

    sections = [key for section in algorithm.form.sections for key in section.names]
    assert sorted(sections) == sorted(EVERYTHING - algorithm.private)
    kept = {key: tensor for key, tensor in coded.carry.items() if not key.startswith("residual.")}
    assert kept.keys() == plain.carry.keys()
    assert all(torch.equal(kept[key], plain.carry[key]) for key in kept)
    residual = {key.removeprefix("residual.") for key in coded.carry.keys() - kept.keys()}
    assert bool(residual) == (codec == "ef_signsgd") and not residual & algorithm.private


def test_the_size_of_an_update_is_that_of_the_shared_part() -> None:
    sizes: dict[str, int] = {}
    for name in ("fedavg", "fedper"):
        federation = parse({"algorithm": {"name": name, "batch": 2}}, source="the test")
        spec = model()
        sizes[name] = tier_sizes(federation, spec, {"all": kinds.build(spec, "output_side")})["all"].nbytes

    assert sizes["fedavg"] - sizes["fedper"] >= 4 * (4 * CLASSES + CLASSES)
