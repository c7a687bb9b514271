"""``edgefl deploy``: a submodel of a trained model becomes one ONNX file that gives torch's logits."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from edgefl.cli import app
from edgefl.config import load
from edgefl.contract.tensors import TensorSpec
from edgefl.data.dataset import Dataset, OtherInput
from edgefl.data.datasets import digits
from edgefl.lab.deployment import DeploymentBuilder, deployed_submodel
from edgefl.models.inputs import call_with_inputs
from edgefl.models.losses.regression import SquaredError
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.zoo.catalog import build_model
from edgefl.models.zoo.resnet import resnet8
from edgefl.setup.evaluation import evaluation_warning
from edgefl.submodels import catalog
from edgefl.submodels.compaction.compact import compact
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire import tensors
from edgefl.wire.tensors import Array, Arrays
from edgefl_export.deploy.export import compare, deploy, group_rows
from edgefl_export.deploy.program import DeployModel
from edgefl_export.deploy.target import DeployTarget
from tests.cli.runner import runner
from tests.models.test_inputs import CLASSES, LENGTH, TEXT, WORDS, reader
from tests.pairs import slow
from tests.support.arrays import weights_of as deploy_inputs_weights
from tests.support.errors import ConfigError, DataError, EdgeflError, ExportError, ModelError, refuses

CONFIG = """
[model]
name = "{model}"
{more}
[data]
name = "digits"
train_samples = 200
test_samples = 100
[tiers.strong]
count = 1
[tiers.layers]
kind = "importance"
gamma = 0.25
options = {{ strategy = "layer" }}
[tiers.half]
kind = "width"
gamma = 0.25
"""
MLP = CONFIG.format(model="mlp", more="options = { hidden = [8, 6] }")
RESNET = CONFIG.format(model="resnet8", more='bn = "static"\noptions = { widths = [4, 6, 8] }')


def small(bn: str = "static") -> ModelSpec:
    return resnet8(size=8, widths=(4, 6, 8), bn=bn, seed=3)


def smallest() -> ModelSpec:
    """What is quick to export, where batch norms have no say."""
    return build_model("mlp", size=8, hidden=(6,), seed=3)


def weights_of(spec: ModelSpec) -> Arrays:
    rng = np.random.default_rng(8)
    return {
        name: (tensor.numpy() + 0.2 * rng.standard_normal(tensor.shape)).astype(np.float32)
        if "running" not in name
        else tensor.numpy().copy()
        for name, tensor in spec.weights.items()
    }


@pytest.fixture(scope="module")
def data() -> Dataset:
    return digits().limited(200, 60)


def run(model: bytes, x: Array) -> Array:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    size = session.get_inputs()[0].shape[0]
    groups = [session.run(None, {"x": x[at]})[0] for at in group_rows(len(x), size)]
    return np.concatenate(groups)[: len(x)]


# -- the artifact ----------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "options", "bn"),
    [
        ("output_side", {}, "global"),
        ("width", {"gamma": 0.3}, "global"),
        slow("width", {"gamma": 0.3}, "static"),
        ("importance", {"gamma": 0.07}, "static"),
    ],
)
def test_every_kind_equals_torch(kind: str, options: dict[str, float], bn: str, data: Dataset) -> None:
    spec = small(bn)
    builder = DeploymentBuilder(spec, data, weights_of(spec), samples=100)
    submodel = catalog.build(spec, kind, **options)

    made = builder.deployment(submodel)

    x = data.read(data.test_x[:10])
    module = builder.module(submodel)
    np.testing.assert_allclose(
        run(made.artifact.model, x), module(torch.from_numpy(x)).numpy(), rtol=1e-3, atol=1e-4
    )
    assert made.facts["batch_norm"] == ("moving" if kind == "output_side" else "frozen")
    found = run(made.artifact.model, data.read(data.test_x)).argmax(axis=1) == data.test_y
    assert made.facts["accuracy"] == pytest.approx(found.mean(), abs=0.02)


def test_the_file_reads_images_only_and_holds_the_weights(data: Dataset) -> None:
    spec = smallest()
    made = DeploymentBuilder(spec, data, weights_of(spec), samples=50).deployment(OutputSide(spec, 0))
    graph = onnx.load_from_string(made.artifact.model).graph
    assert [(port.name, [d.dim_value for d in port.type.tensor_type.shape.dim]) for port in graph.input] == [
        ("x", [1, 1, 8, 8])
    ]
    assert [port.name for port in graph.output] == ["logits"]
    held = sum(
        int(np.prod(tensor.dims))
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    )
    assert held >= made.facts["parameters"] == sum(p.numel() for p in spec.module.parameters())


def test_equal_weights_give_equal_bytes(data: Dataset) -> None:
    spec = smallest()
    module = DeploymentBuilder(spec, data, weights_of(spec)).module(OutputSide(spec, 0))
    rows = {"x": torch.from_numpy(data.read(data.test_x[:4]))}
    subject = DeployModel(module, {"x": spec.sample})
    one, other = (deploy(subject, rows).artifact({"classes": ["a", "b"]}).model for _ in range(2))
    assert one == other


def test_batch_statistics_belong_to_the_batch_they_come_in(data: Dataset) -> None:
    spec = small()
    builder = DeploymentBuilder(spec, data, weights_of(spec), "batch", 20)
    made = builder.deployment(catalog.build(spec, "importance", gamma=0.3))
    x = data.read(data.test_x[:20])
    one, other = run(made.artifact.model, x), run(made.artifact.model, np.concatenate([x[:10], x[:10]]))
    assert made.facts["batch_norm"] == "batch" and np.abs(one[:10] - other[:10]).max() > 1e-3


@pytest.mark.parametrize("bn", ["static", "global"])
def test_statistics_need_no_training_samples(bn: str, data: Dataset) -> None:
    spec = small(bn)
    server = replace(data, train_x=data.train_x[:0], train_y=data.train_y[:0])
    builder = DeploymentBuilder(spec, server, weights_of(spec))
    cut = catalog.build(spec, "width", gamma=0.25)
    test_rows = replace(data, train_x=data.test_x, train_y=data.test_y)
    right = DeploymentBuilder(spec, test_rows, weights_of(spec)).module(cut).state_dict()
    for name, tensor in builder.module(cut).state_dict().items():
        assert torch.equal(tensor, right[name]), name

    none = replace(server, test_x=data.test_x[:0], test_y=data.test_y[:0])
    with pytest.raises(
        DataError, match=r"at least one row .* found none; .*`bn_eval` moving .* costs accuracy"
    ):
        DeploymentBuilder(spec, none, weights_of(spec)).module(cut)
    with pytest.raises(DataError, match=r"at least one test sample .* found none; add test_x"):
        DeploymentBuilder(spec, none, weights_of(spec)).deployment(cut)


@pytest.mark.parametrize(
    ("kind", "recalibrated"), [("output_side", False), ("importance", True), ("width", True)]
)
def test_whole_models_get_statistics(kind: str, recalibrated: bool, data: Dataset, tmp_path: Path) -> None:
    size = "cut = 2" if kind == "output_side" else f'kind = "{kind}"\ngamma = 0.25'
    (tmp_path / "run.toml").write_text(
        RESNET[: RESNET.index("[tiers")].replace("static", "global") + f"[tiers.a]\n{size}\n"
    )
    federation = load(tmp_path / "run.toml")
    few = data.limited(20, 20)
    builder = DeploymentBuilder.of(federation, few, weights_of(small("global")))
    _, source = builder._build(OutputSide(builder.spec, 0))
    assert (source == "frozen") == recalibrated
    warned = evaluation_warning(federation, builder.spec, few)
    assert ("expected at least 32, found 20" in warned) == recalibrated


# -- the statistics of a cut -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> tuple[ModelSpec, Dataset, Arrays]:
    """A model with moving statistics that learned the digits, whole."""
    spec, dataset = resnet8(size=8, widths=(8, 16, 32), bn="global", seed=1), digits()
    module = copy.deepcopy(spec.module).train()
    x, y = torch.from_numpy(dataset.read(dataset.train_x)), torch.from_numpy(dataset.train_y)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _epoch in range(3):
        for rows in torch.randperm(len(y), generator=generator).split(32):
            optimizer.zero_grad()
            spec.loss.each(module(x[rows]), y[rows]).mean().backward()
            optimizer.step()
    return spec, dataset, {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


@pytest.mark.slow
def test_a_cut_with_own_statistics_beats_moving_ones(whole: tuple[ModelSpec, Dataset, Arrays]) -> None:
    spec, dataset, weights = whole
    cut = catalog.build(spec, "importance", gamma=0.25)
    made = {
        bn_eval: DeploymentBuilder(spec, dataset, weights, bn_eval, batch).deployment(cut).facts
        for bn_eval, batch in (("frozen", 1), ("moving", 1), ("batch", 100))
    }
    assert {name: facts["batch_norm"] for name, facts in made.items()} == {name: name for name in made}
    assert made["frozen"]["accuracy"] > made["moving"]["accuracy"] + 0.15
    assert made["batch"]["accuracy"] > made["moving"]["accuracy"] + 0.15


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["output_side", "importance", "width", "importance_structured"])
def test_the_whole_model_keeps_its_statistics(kind: str, whole: tuple[ModelSpec, Dataset, Arrays]) -> None:
    spec, dataset, weights = whole
    module = DeploymentBuilder(spec, dataset, weights).module(
        catalog.build(spec, kind, **({} if kind == "output_side" else {"gamma": 1.0}))
    )
    for name, tensor in module.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), weights[name])


@pytest.mark.slow
def test_structured_cuts_take_the_counts_of_trained_weights(tmp_path: Path) -> None:
    tier = '[tiers.thin]\nkind = "importance_structured"\ngamma = 0.25\n'
    (tmp_path / "run.toml").write_text(RESNET + tier)
    federation, spec = load(tmp_path / "run.toml"), small()
    weights = weights_of(spec)
    weights["block3.conv2.weight"][:] *= 30
    fixed = catalog.build(spec, "importance_structured", gamma=0.25)

    free = deployed_submodel(federation, spec, kind="importance_structured", gamma=0.25, weights=weights)
    assert free.identity == fixed.replan(weights).identity != fixed.identity
    assert deployed_submodel(federation, spec, tier="thin", weights=weights).identity == fixed.identity
    numbers = list(fixed.numbers)
    told = deployed_submodel(
        federation,
        spec,
        kind="importance_structured",
        gamma=0.25,
        options={"counts": numbers},
        weights=weights,
    )
    assert told.identity == fixed.identity


def test_a_file_that_differs_from_its_module_is_refused(data: Dataset) -> None:
    spec, rows = smallest(), {"x": torch.from_numpy(data.read(data.test_x[:4]))}
    module = DeploymentBuilder(spec, data, weights_of(spec)).module(OutputSide(spec, 0))
    made = deploy(DeployModel(module, {"x": spec.sample}), rows)
    other = copy.deepcopy(module)
    other.get_parameter("head.dense.bias").add_(0.1)
    with refuses(ExportError, error=pytest.approx(0.1, rel=0.01), allowed=...):
        compare(DeployModel(other, {"x": spec.sample}), made.forward, rows)


def test_what_computes_the_same_may_take_the_module_s_place(data: Dataset) -> None:
    spec = smallest()
    seen: list[nn.Sequential] = []

    def smaller(module: nn.Sequential) -> nn.Sequential:
        seen.append(module)
        return module[:-1].append(module[-1])

    made = DeploymentBuilder(spec, data, weights_of(spec)).deployment(OutputSide(spec, 0), smaller)
    assert len(seen) == 1 and made.facts["accuracy"] == made.facts["whole_accuracy"]


def test_groups_are_full_and_wrap_around() -> None:
    assert [group.tolist() for group in group_rows(5, 2)] == [[0, 1], [2, 3], [4, 0]]
    assert [group.tolist() for group in group_rows(2, 5)] == [[0, 1, 0, 1, 0]]


# -- what is cut, and what is refused ------------------------------------------------------------------------


def test_an_unknown_size_is_cut_by_the_models_rule(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RESNET)
    federation, spec = load(tmp_path / "run.toml"), small()
    found = deployed_submodel(federation, spec, kind="importance", gamma=0.11)
    assert found.identity == catalog.build(spec, "importance", gamma=0.11, strategy="layer").identity
    plain = deployed_submodel(federation, spec, kind="importance", gamma=0.11, options={"strategy": "model"})
    assert plain.identity == catalog.build(spec, "importance", gamma=0.11).identity
    assert (
        deployed_submodel(federation, spec, tier="half").identity
        == catalog.build(spec, "width", gamma=0.25).identity
    )
    assert deployed_submodel(federation, spec).identity == OutputSide(spec, 0).identity


def test_a_size_that_is_asked_for_replaces_the_size_of_the_tiers(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        RESNET[: RESNET.rindex("gamma")] + "options = { ratio = 0.5, scaler = true }"
    )
    found = deployed_submodel(load(tmp_path / "run.toml"), small(), kind="width", gamma=0.1)
    assert found.identity == catalog.build(small(), "width", gamma=0.1, scaler=True).identity


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"tier": "none"}, "no tier 'none'; there are: strong, layers, half"),
        ({"tier": "half", "kind": "width"}, "either a tier, .* or a kind, not both"),
        ({"gamma": 0.5}, "kind output_side is the whole model in inference"),
        ({"kind": "cake", "gamma": 0.5}, "tier 'cake': no submodel kind 'cake'; there are: "),
    ],
)
def test_an_impossible_choice_is_told(choice: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RESNET)
    with pytest.raises(ConfigError, match=message):
        deployed_submodel(load(tmp_path / "run.toml"), small(), **choice)  # type: ignore[arg-type]


def test_batch_statistics_need_a_batch_and_a_norm_that_takes_them(data: Dataset) -> None:
    with refuses(ConfigError, batch=1):
        DeploymentBuilder(small(), data, {}, "batch")
    with refuses(ConfigError, model="mlp", bn_eval="batch"):
        DeploymentBuilder(build_model("mlp", size=8), data, {}, "batch", 20)
    with refuses(ConfigError, model="resnet8", bn_eval="moving"):
        DeploymentBuilder(small(), data, {}, "moving")


# -- the command -------------------------------------------------------------------------------------------------


def command(folder: Path, *options: str) -> str:
    """What the command prints; raises what it raises."""
    out = [] if "--out" in options else ["--out", str(folder / "phone.onnx")]
    ran = runner().invoke(app, ["deploy", *options, *out])
    if isinstance(ran.exception, EdgeflError):
        raise ran.exception
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def trained(folder: Path, config: str = MLP) -> Path:
    """A folder as a run leaves it; its weights."""
    (folder / "run.toml").write_text(config)
    from edgefl.setup.data import open_data
    from edgefl.setup.model import federation_model

    federation = load(folder / "run.toml")
    path = folder / "model.safetensors"
    path.write_bytes(tensors.dump(weights_of(federation_model(federation, open_data(federation)))))
    return path


def test_the_command_writes_the_file_and_its_facts(tmp_path: Path) -> None:
    weights = trained(tmp_path)
    out = command(tmp_path, "--weights", str(weights), "--tier", "layers", "--gamma", "1/10", "--json")
    facts = json.loads(out)
    beside = json.loads((tmp_path / "phone.json").read_text())
    assert facts == beside | {"file": str(tmp_path / "phone.onnx")}
    assert facts["submodel"]["gamma"] == pytest.approx(0.1) and facts["batch_norm"] == "none"
    assert facts["nonzero"] < facts["parameters"] and facts["max_rel_error"] < 1e-3
    assert {"accuracy", "whole_accuracy"} <= facts.keys()
    assert (tmp_path / "phone.onnx").stat().st_size == facts["bytes"]


def test_a_failed_measurement_keeps_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = trained(tmp_path)
    monkeypatch.setenv("PYTHONMALLOC", "none")  # ends each new Python process
    with pytest.raises(ExportError, match=r"phone\.onnx is written, but not measured: ") as caught:
        command(tmp_path, "--weights", str(weights))
    assert "\n" not in caught.value.message
    facts = json.loads((tmp_path / "phone.json").read_text())
    assert (tmp_path / "phone.onnx").stat().st_size == facts["bytes"] and "latency_ms" not in facts


@pytest.mark.slow
def test_a_compact_file_computes_the_same_with_less(tmp_path: Path) -> None:
    options = ["--weights", str(trained(tmp_path)), "--kind", "importance", "--gamma", "0.05"]
    options += ["--option", "strategy='model'", "--json"]
    whole, small = (json.loads(command(tmp_path, *options, *more)) for more in ([], ["--compact", "--force"]))
    assert small["parameters"] < whole["parameters"] and small["macs"] < whole["macs"]
    assert small["bytes"] < whole["bytes"] and small["accuracy"] == whole["accuracy"]


@pytest.mark.slow
def test_the_command_prints_the_accuracy_beside_the_whole_model_s(tmp_path: Path) -> None:
    printed = command(tmp_path, "--weights", str(trained(tmp_path)), "--tier", "half", "--batch", "4")
    assert "whole" in printed and len(re.findall(r"\d+\.\d\d%", printed)) == 2
    graph = onnx.load(tmp_path / "phone.onnx").graph
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_value == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--gamma", "0"], ConfigError, r"--gamma lies in \(0, 1\], found 0"),
        (["--gamma", "few"], ConfigError, "--gamma is a share such as 0.1 or 1/16, found 'few'"),
        (["--option", "strategy=layer"], ConfigError, "--option is KEY=VALUE as TOML writes it"),
        (["--kind", "width", "--gamma", "0.0001"], ModelError, "no slice of mlp is as narrow as 0.01"),
    ],
)
def test_options_that_cannot_be_used_are_told(
    options: list[str], error: type[EdgeflError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        command(tmp_path, "--weights", str(trained(tmp_path)), *options)


def test_weights_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    weights = trained(tmp_path)
    with pytest.raises(DataError, match=r"there is no file or folder .*; did you mean .*model\.safetensors"):
        command(tmp_path, "--weights", str(tmp_path / "other.safetensors"))
    (tmp_path / "run.toml").rename(tmp_path / "elsewhere.toml")
    with pytest.raises(ConfigError, match=r"expected run\.toml of a run or config\.toml .* found neither"):
        command(tmp_path, "--weights", str(weights))
    with refuses(DataError, path=str(tmp_path / "elsewhere.toml"), error=...):
        command(tmp_path, "--weights", str(tmp_path / "elsewhere.toml"))
    (tmp_path / "run.toml").write_text(RESNET)
    with refuses(ModelError, wrong=...):
        command(tmp_path, "--weights", str(weights))


# -- ``edgefl deploy`` of models with several inputs -------------------------------------------------------


PIXELS = {"x": TensorSpec((3, 6, 6)), "place": TensorSpec((2,))}


class Placed(nn.Module):
    """An image, and where it was taken: the place moves what a convolution finds."""

    def __init__(self, outputs: int = CLASSES, channels: tuple[int, int] = (6, 8)) -> None:
        super().__init__()
        a, b = channels
        self.first, self.norm, self.place = nn.Conv2d(3, a, 3, padding=1), nn.BatchNorm2d(a), nn.Linear(2, a)
        self.second, self.head = nn.Conv2d(a, b, 3, padding=1), nn.Linear(b, outputs)

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        found = self.norm(self.first(x) + self.place(place)[:, :, None, None]).relu()
        return self.head(self.second(found).relu().mean((2, 3)))


def texts(rows: int = 24) -> Dataset:
    random = np.random.default_rng(3)
    parts = []
    for _ in range(2):
        mask = (np.arange(LENGTH) < random.integers(1, LENGTH + 1, (rows, 1))).astype(np.int64)
        words = random.integers(WORDS, size=(rows, LENGTH))
        parts.append((words, mask, random.integers(CLASSES, size=rows)))
    (x, mask, y), (test_x, test_mask, test_y) = parts
    others = {"attention_mask": OtherInput(mask, test_mask, 2)}
    return Dataset.of(x, y, test_x, test_y, below=WORDS, classes=CLASSES, others=others)


def pictures(rows: int = 24) -> Dataset:
    random = np.random.default_rng(4)
    draw = lambda *shape: random.standard_normal((rows, *shape)).astype(np.float32)  # noqa: E731
    y = [random.integers(CLASSES, size=rows) for _ in range(2)]
    others = {"place": OtherInput(draw(2), draw(2))}
    return Dataset.of(draw(3, 6, 6), y[0], draw(3, 6, 6), y[1], classes=CLASSES, others=others)


def placed(outputs: int = CLASSES, **more: object) -> ModelSpec:
    torch.manual_seed(2)
    return split(Placed(outputs), sample=PIXELS, classes=CLASSES, **more)  # type: ignore[arg-type]


def deploy_inputs_run(model: bytes, inputs: Arrays) -> Array:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, inputs)[0])


def test_every_input_is_a_port_of_its_own_name_and_has_a_say() -> None:
    data, module = texts(), reader()
    spec = split(module, sample=TEXT, classes=CLASSES)
    made = DeploymentBuilder(spec, data, deploy_inputs_weights(spec), batch=5).deployment(OutputSide(spec, 2))

    assert [(each["name"], each["dtype"], each["shape"]) for each in made.facts["inputs"]] == [
        ("ids", "int64", [5, LENGTH]),
        ("attention_mask", "int64", [5, LENGTH]),
    ]
    given = data.test_batch(np.arange(5))
    del given["y"]
    given["ids"] = given.pop("x")
    out = deploy_inputs_run(made.artifact.model, given)
    expected = module.eval()(torch.from_numpy(given["ids"]), torch.from_numpy(given["attention_mask"]))
    np.testing.assert_allclose(out, expected.detach().numpy(), atol=1e-5)
    seen = deploy_inputs_run(
        made.artifact.model, given | {"attention_mask": np.ones_like(given["attention_mask"])}
    )
    assert not np.allclose(out, seen, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["importance", "width"])
def test_statistics_of_a_cut_come_from_samples_with_all_their_inputs(kind: str) -> None:
    data, spec = pictures(), placed()
    far = {"place": OtherInput(data.others["place"].train + 3, data.others["place"].test)}
    near, moved = (
        DeploymentBuilder(spec, each, deploy_inputs_weights(spec))
        .module(catalog.build(spec, kind, gamma=0.5))
        .state_dict()
        for each in (data, replace(data, others=far))
    )
    (mean,) = (name for name in near if name.endswith("running_mean"))
    (weight,) = (tensor for tensor in near.values() if tensor.shape[1:] == (2,))
    torch.testing.assert_close(moved[mean] - near[mean], 3 * weight.sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_compact_file_still_reads_the_other_input() -> None:
    """A channel that a place alone gives something stays; one that nothing does goes."""
    data, spec = pictures(), placed()
    weights = deploy_inputs_weights(spec)
    for path, channels in (("first", [0, 1]), ("place", [1]), ("second", [2, 3])):
        for each in ("weight", "bias"):
            (name,) = (name for name in weights if name.endswith(f"{path}.{each}"))
            weights[name][channels] = 0
    builder = DeploymentBuilder(spec, data, weights)

    def smaller(module: nn.Sequential) -> nn.Sequential:
        named = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
        return compact(replace(spec, module=module), named, {}).spec.module

    whole, small = (builder.deployment(OutputSide(spec, 0), *each) for each in ((), (smaller,)))

    assert [each["name"] for each in small.facts["inputs"]] == ["x", "place"]
    # Of the first six channels one goes, of the second eight two.
    assert small.facts["parameters"] == sum(each.numel() for each in Placed(channels=(5, 6)).parameters())
    batch = data.test_batch(np.arange(1))
    del batch["y"]
    for place in (batch["place"], batch["place"] + 2):
        given = batch | {"place": place}
        np.testing.assert_allclose(
            deploy_inputs_run(small.artifact.model, given),
            deploy_inputs_run(whole.artifact.model, given),
            atol=1e-5,
        )


def test_labels_without_a_dimension_are_compared_with_a_single_number() -> None:
    """(n,) beside (n, 1) would be compared each with each."""
    data, spec = pictures(), placed(1, loss=SquaredError())
    random = np.random.default_rng(0)
    y = [random.standard_normal(24).astype(np.float32) for _ in range(2)]
    data = Dataset.of(data.train_x, y[0], data.test_x, y[1], classes=1, others=data.others)
    builder = DeploymentBuilder(spec, data, deploy_inputs_weights(spec))
    module = builder.module(OutputSide(spec, 0))
    given = {name: torch.from_numpy(each) for name, each in data.test_batch(np.arange(24)).items()}
    expected = float((call_with_inputs(module, given)[:, 0] - given["y"]).abs().mean())
    assert builder.score(module) == pytest.approx(expected, rel=1e-5)


class Renamed(nn.Module):
    """Adds to x an input that is called as values inside of a graph are."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, v0: Tensor) -> Tensor:
        return self.head((self.dense(x) + v0).relu())


class Taken(Renamed):
    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return super().forward(x, logits)


def test_names_of_inputs_do_not_meet_those_inside_the_graph() -> None:
    torch.manual_seed(0)
    module = Renamed().eval()
    spec = split(module, sample={"x": TensorSpec((4,)), "v0": TensorSpec((4,))}, classes=2)
    rows = {name: torch.randn(6, 4) for name in ("x", "v0")}
    made = deploy(
        DeployModel(spec.module.eval(), {"x": spec.sample, **spec.others}), rows, DeployTarget(batch=3)
    )
    assert made.program.inputs == ("x", "v0") and made.max_rel_error < 1e-5


def test_an_input_that_is_called_as_the_output_is_refused() -> None:
    spec = split(Taken(), sample={"x": TensorSpec((4,)), "logits": TensorSpec((4,))}, classes=2)
    rows = {name: torch.randn(6, 4) for name in ("x", "logits")}
    with refuses(ExportError, input="logits"):
        deploy(DeployModel(spec.module.eval(), {"x": spec.sample, **spec.others}), rows)
