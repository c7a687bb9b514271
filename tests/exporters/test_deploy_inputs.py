"""``edgefl deploy`` of models with several inputs: one file that reads all of them by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.data.dataset import Dataset, OtherInput
from edgefl.errors import ExportError
from edgefl.lab.deployment import DeploymentBuilder
from edgefl.models.inputs import call_with_inputs
from edgefl.models.losses.regression import SquaredError
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.submodels import catalog
from edgefl.submodels.compaction.compact import compact
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.tensors import Array, Arrays
from edgefl_export.deploy.export import deploy
from edgefl_export.deploy.program import Subject
from edgefl_export.deploy.target import DeployTarget
from tests.models.test_inputs import CLASSES, LENGTH, TEXT, WORDS, reader
from tests.support.arrays import weights_of

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


def run(model: bytes, inputs: Arrays) -> Array:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, inputs)[0])


def test_every_input_is_a_port_of_its_own_name_and_has_a_say() -> None:
    data, module = texts(), reader()
    spec = split(module, sample=TEXT, classes=CLASSES)
    made = DeploymentBuilder(spec, data, weights_of(spec), batch=5).deployment(OutputSide(spec, 2))

    assert [(each["name"], each["dtype"], each["shape"]) for each in made.facts["inputs"]] == [
        ("ids", "int64", [5, LENGTH]),
        ("attention_mask", "int64", [5, LENGTH]),
    ]
    given = data.test_batch(np.arange(5))
    del given["y"]
    given["ids"] = given.pop("x")
    out = run(made.artifact.model, given)
    expected = module.eval()(torch.from_numpy(given["ids"]), torch.from_numpy(given["attention_mask"]))
    np.testing.assert_allclose(out, expected.detach().numpy(), atol=1e-5)
    seen = run(made.artifact.model, given | {"attention_mask": np.ones_like(given["attention_mask"])})
    assert not np.allclose(out, seen, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["importance", "width"])
def test_statistics_of_a_cut_come_from_samples_with_all_their_inputs(kind: str) -> None:
    data, spec = pictures(), placed()
    far = {"place": OtherInput(data.others["place"].train + 3, data.others["place"].test)}
    near, moved = (
        DeploymentBuilder(spec, each, weights_of(spec))
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
    weights = weights_of(spec)
    for path, channels in (("first", [0, 1]), ("place", [1]), ("second", [2, 3])):
        for each in ("weight", "bias"):
            (name,) = (name for name in weights if name.endswith(f"{path}.{each}"))
            weights[name][channels] = 0
    workshop = DeploymentBuilder(spec, data, weights)

    def smaller(module: nn.Sequential) -> nn.Sequential:
        named = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
        return compact(replace(spec, module=module), named, {}).spec.module

    whole, small = (workshop.deployment(OutputSide(spec, 0), *each) for each in ((), (smaller,)))

    assert [each["name"] for each in small.facts["inputs"]] == ["x", "place"]
    # Of the first six channels one goes, of the second eight two.
    assert small.facts["parameters"] == sum(each.numel() for each in Placed(channels=(5, 6)).parameters())
    batch = data.test_batch(np.arange(1))
    del batch["y"]
    for place in (batch["place"], batch["place"] + 2):
        given = batch | {"place": place}
        np.testing.assert_allclose(
            run(small.artifact.model, given), run(whole.artifact.model, given), atol=1e-5
        )


def test_labels_without_a_dimension_are_compared_with_a_single_number() -> None:
    """(n,) beside (n, 1) would be compared each with each."""
    data, spec = pictures(), placed(1, loss=SquaredError())
    random = np.random.default_rng(0)
    y = [random.standard_normal(24).astype(np.float32) for _ in range(2)]
    data = Dataset.of(data.train_x, y[0], data.test_x, y[1], classes=1, others=data.others)
    workshop = DeploymentBuilder(spec, data, weights_of(spec))
    module = workshop.module(OutputSide(spec, 0))
    given = {name: torch.from_numpy(each) for name, each in data.test_batch(np.arange(24)).items()}
    expected = float((call_with_inputs(module, given)[:, 0] - given["y"]).abs().mean())
    assert workshop.score(module) == pytest.approx(expected, rel=1e-5)


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
    made = deploy(Subject(spec.module.eval(), {"x": spec.sample, **spec.others}), rows, DeployTarget(batch=3))
    assert made.program.inputs == ("x", "v0") and made.max_rel_error < 1e-5


def test_an_input_that_is_called_as_the_output_is_refused() -> None:
    spec = split(Taken(), sample={"x": TensorSpec((4,)), "logits": TensorSpec((4,))}, classes=2)
    rows = {name: torch.randn(6, 4) for name in ("x", "logits")}
    with pytest.raises(ExportError, match="an input of the model is called 'logits'"):
        deploy(Subject(spec.module.eval(), {"x": spec.sample, **spec.others}), rows)
