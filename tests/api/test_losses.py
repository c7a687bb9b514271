"""A loss from an argument or a file's table to the labels of devices, the evaluation and the history of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import edgefl
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.config import parse
from edgefl.config.names import name_problems
from edgefl.config.text import dump
from edgefl.contract.tensors import TensorSpec
from edgefl.models import losses
from edgefl.objective.objective import Objective
from edgefl.setup.bundles import request_of
from edgefl.setup.evaluation import evaluation
from edgefl.setup.federation_options import parse_loss
from edgefl.setup.model import federation_model
from edgefl.setup.runs import run_digest
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_server.evaluator import EvaluationResult, round_closed
from edgefl_server.events import RoundClosed
from edgefl_server.storage.audit import HistoryWriter
from tests.support.arrays import weights_of
from tests.support.errors import ConfigError, DataError, ModelError, refuses

HERE = Path(__file__).resolve()
VOCABULARY, LENGTH = 7, 5


def off_by(out: Tensor, y: Tensor, *, least: float = 1.0) -> Tensor:
    return ((out - y).abs() / y.abs().clamp_min(least)).mean(dim=1)


def regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 2))


def painter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1))


def speaker() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))


def dataset(x: Any, y: Any, **facts: Any) -> edgefl.data.Dataset:
    return edgefl.data.Dataset.of(x, y, x[:6], y[:6], name="made", **facts)


RNG = np.random.default_rng(0)
NUMBERS = RNG.standard_normal((20, 4)).astype(np.float32)
TOKENS = RNG.integers(0, VOCABULARY, (20, LENGTH))
PADDED = np.where(np.arange(LENGTH) < RNG.integers(2, LENGTH + 1, (20, 1)), TOKENS, -100)
IMAGES = RNG.integers(0, 256, (20, 6, 6)).astype(np.uint8)
PRICES = dataset(NUMBERS, NUMBERS[:, :2])
PICTURED = dataset(IMAGES, NUMBERS[:, :2])
TAGGED = dataset(TOKENS, (TOKENS + 3) % VOCABULARY, classes=VOCABULARY, below=VOCABULARY)
WINDOWS = dataset(TOKENS[:, :-1], TOKENS[:, 1:], classes=VOCABULARY, below=VOCABULARY)
TEXTS = dataset(TOKENS, PADDED, classes=VOCABULARY, below=VOCABULARY, ignored=-100)


WRITTEN: list[tuple[Any, str, dict[str, Any]]] = [
    (edgefl.losses.Huber(delta=2.0), "huber", {"delta": 2.0}),
    (edgefl.losses.CausalLM, "causal_lm", {}),
    ("squared_error", "squared_error", {}),
    (losses.Quantile(levels=(0.1, 0.9)), "quantile", {"levels": [0.1, 0.9]}),
    (losses.CausalLM(ignore_index=0), "causal_lm", {"ignore_index": 0}),
    (off_by, f"{HERE}:off_by", {}),
    (edgefl.losses.own_loss(off_by), f"{HERE}:off_by", {}),
]


@pytest.mark.parametrize(("loss", "name", "options"), WRITTEN)
def test_a_loss_is_a_table_of_the_file(loss: Any, name: str, options: dict[str, Any]) -> None:
    made = edgefl.federation("mlp", training=edgefl.Training(loss=loss))
    assert made.loss.name == name and parse_file(dump(made)).loss.options == options


def parse_file(text: str) -> edgefl.config.Federation:
    import tomllib

    return parse(tomllib.loads(text), source="the test")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out, y: out, "a loss of your own is a function at the top level of a file"),
        (
            losses.CausalLM(ignore_index=None),
            "ignore_index of the loss 'causal_lm' is None, which a file cannot say",
        ),
        (
            edgefl.losses.CausalLM(ignore_index=None),
            "ignore_index of the loss 'causal_lm' is None, which a file cannot say",
        ),
        (3, "argument `loss` is 3, which other processes cannot load"),
        (edgefl.algorithms.SGD(), "argument `loss` is SGD"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        edgefl.federation("mlp", training=edgefl.Training(loss=loss))


PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"name": "hubber"}, "loss.name: no loss 'hubber'; there are: cross_entropy, "),
    (
        {"name": "huber", "options": {"sigma": 1}},
        "loss.options.sigma: loss 'huber' has no option 'sigma'; it takes delta",
    ),
    (
        {"name": "huber", "options": {"delta": "far"}},
        "loss.options.delta: Expected `float`, got `str` (found 'far')",
    ),
    ({"name": "gone.py:mine"}, "loss.name: there is no file gone.py"),
]


@pytest.mark.parametrize(("table", "problem"), PROBLEMS)
def test_every_problem_of_the_table_is_told_with_its_key(table: dict[str, Any], problem: str) -> None:
    [found] = name_problems({"loss": table})
    assert found.startswith(problem)


def test_options_without_a_loss_are_refused() -> None:
    with pytest.raises(ConfigError, match="options belong to a loss: set name"):
        parse({"loss": {"options": {"delta": 1.0}}}, source="the test")


def test_another_loss_is_another_run() -> None:
    runs = [
        run_digest(edgefl.federation("mlp", training=edgefl.Training(loss=each)))
        for each in (None, "huber", edgefl.losses.Huber(delta=2.0), off_by)
    ]
    assert len({*runs}) == 4


def test_one_line_names_a_loss() -> None:
    assert parse_loss("huber:delta=2") == {"name": "huber", "options": {"delta": 2}}
    assert parse_loss("a/b.py:mine") == {"name": "a/b.py:mine", "options": {}}
    assert parse_loss("a/b.py:mine:least=0.5,k=[1, 2]") == {
        "name": "a/b.py:mine",
        "options": {"least": 0.5, "k": [1, 2]},
    }


def spec_of(
    tmp_path: Path, data: edgefl.data.Dataset, model: Any, **changes: Any
) -> edgefl.submodels.ModelSpec:
    path = data.save(tmp_path / "data.npz")
    made = edgefl.federation(model, data=path, training=edgefl.Training(**changes))
    return federation_model(made, edgefl.data.Dataset.load(path))


def test_a_model_gets_the_loss_that_its_file_names(tmp_path: Path) -> None:
    assert spec_of(tmp_path, PRICES, regressor, loss=edgefl.losses.Huber(delta=2.0)).loss == losses.Huber(
        delta=2.0
    )
    assert spec_of(tmp_path, PICTURED, "mlp", loss="squared_error").label == TensorSpec((2,), torch.float32)
    own = spec_of(tmp_path, PRICES, regressor, loss=edgefl.losses.own_loss(off_by))
    assert own.label == TensorSpec((2,), torch.float32) and own.metrics == ()
    spoken = spec_of(tmp_path, TEXTS, speaker, loss=edgefl.losses.CausalLM())
    assert spoken.label == TensorSpec((LENGTH,), torch.int64, VOCABULARY, -100)
    assert spoken.metrics == ("perplexity", "accuracy")


def test_a_model_without_a_loss_gets_the_one_that_fits_the_labels(tmp_path: Path) -> None:
    assert spec_of(tmp_path, TEXTS, speaker).loss == losses.CausalLM()
    assert spec_of(tmp_path, WINDOWS, speaker).loss == losses.CausalLM(ignore_index=None, shift=False)
    levels = RNG.integers(0, 3, (20, 6, 6))
    border = np.where(levels == 2, 255, levels)
    assert spec_of(tmp_path, dataset(IMAGES, levels), painter).loss == losses.CrossEntropy()
    made = spec_of(tmp_path, dataset(IMAGES, border, classes=3, ignored=255), painter)
    assert made.loss == losses.CrossEntropy(ignore_index=255) and made.metrics[0] == "accuracy"


UNFIT: list[tuple[edgefl.data.Dataset, Any, dict[str, Any], str]] = [
    (
        PRICES,
        regressor,
        {},
        r"labels are float32 \(2,\): name the loss: binary_cross_entropy, squared_error, .* fit",
    ),
    (
        PICTURED,
        "mlp",
        {},
        r"numbers of shape \(2,\) per sample: choose the loss that fits \(binary_cross_entropy, squared",
    ),
    (TAGGED, speaker, {}, r"name the loss: sequence_cross_entropy, causal_lm fit"),
    (
        TEXTS,
        speaker,
        {"loss": edgefl.losses.CausalLM(shift=False)},
        r"the tokens themselves, .* repeat each token: set shift = true",
    ),
    (
        WINDOWS,
        speaker,
        {"loss": edgefl.losses.CausalLM()},
        r"already the tokens that follow, .* after the next one: set shift = f",
    ),
    (
        TEXTS,
        speaker,
        {"loss": edgefl.losses.CausalLM(ignore_index=3)},
        r"labels -100 of made count for nothing, .*ignore_index = -100",
    ),
    (
        TEXTS,
        speaker,
        {"loss": "squared_error"},
        r"is trained on labels of shape \(5, 7\) and type torch.float32",
    ),
]


@pytest.mark.parametrize(("data", "model", "changes", "message"), UNFIT)
def test_labels_that_no_loss_or_several_read_are_told_with_what_fits(
    tmp_path: Path, data: edgefl.data.Dataset, model: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(edgefl.EdgeflError, match=message):
        spec_of(tmp_path, data, model, **changes)


def test_labels_that_are_no_class_are_refused() -> None:
    with pytest.raises(DataError, match="labels go from -100 to 6, and 7 classes are 0 to 6"):
        dataset(TOKENS, PADDED, classes=VOCABULARY, below=VOCABULARY)
    assert dataset(TOKENS, PADDED, below=VOCABULARY, ignored=-100).classes == VOCABULARY


def test_a_spec_whose_loss_reads_its_output_reversed_is_refused() -> None:
    tokens = TensorSpec((LENGTH,), torch.int64, VOCABULARY)
    spec = edgefl.submodels.ModelSpec("speaker", cast(nn.Sequential, speaker()), tokens, VOCABULARY)
    with refuses(ModelError, found=(5, 7), classes=7):
        edgefl.compile(spec)


def test_a_column_of_numbers_is_a_label_of_one_number(tmp_path: Path) -> None:
    column = dataset(IMAGES, NUMBERS[:, 0])
    spec = spec_of(tmp_path, column, "mlp", loss="huber")
    assert spec.label == TensorSpec((1,), torch.float32)
    found = evaluated(spec, column)
    out = spec.module.eval()(torch.from_numpy(column.read(column.test_x)))[:, 0]
    assert found["mae"] == pytest.approx(
        float((out - torch.from_numpy(NUMBERS[:6, 0])).abs().mean()), rel=1e-5
    )


def evaluated(spec: edgefl.submodels.ModelSpec, data: edgefl.data.Dataset) -> dict[str, float]:
    algorithm = sgd(Objective.of(OutputSide(spec, 0)), batch=4)
    weights = weights_of(spec)
    return dict(evaluation(spec, algorithm, data, "cpu")(weights))


def test_the_server_measures_what_the_task_is_measured_by(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, TEXTS, speaker, loss=edgefl.losses.CausalLM())
    found = evaluated(spec, TEXTS)
    with torch.inference_mode():
        out = spec.module.eval()(torch.from_numpy(TOKENS[:6]))
        wanted = nn.functional.cross_entropy(out[:, :-1].transpose(1, 2), torch.from_numpy(PADDED[:6, 1:]))
    assert list(found) == ["perplexity", "accuracy", "loss"]
    assert found["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-5)
    assert found["loss"] == pytest.approx(float(wanted), rel=1e-5)


def test_a_bundle_tells_devices_which_label_counts_for_nothing() -> None:
    bundle = edgefl.compile(
        speaker,
        data=TEXTS,
        training=edgefl.Training(loss=edgefl.losses.CausalLM(), algorithm=edgefl.algorithms.SGD(batch=4)),
    )
    [port] = [each for each in bundle.manifest.graph("train").inputs_of("batch") if each.label == "0.y"]
    assert (port.dtype, port.shape, port.ignored) == ("int64", (4, LENGTH), -100)
    again = request_of(
        bundle.manifest, edgefl.federation(speaker, training=edgefl.Training(loss=edgefl.losses.CausalLM()))
    )
    assert again.algorithm.phases[0].function.inputs["batch.0.y"].ignored == -100
    result = edgefl.train_round(bundle, bundle.initial_weights(), TOKENS, PADDED)
    assert math.isfinite(result.metrics["loss"])


def told(number: int, metrics: dict[str, float]) -> RoundClosed:
    details = {
        "train_loss": 1.0,
        "seconds": 1.0,
        "reports": 1,
        "rejected": 0,
        "weights_sha256": "a",
        "text": "",
    }
    details |= {"down_bytes": 1, "up_bytes": 1, "server_down_bytes": 1}
    return round_closed(EvaluationResult(number, metrics), "closed", details, "perplexity")


def test_history_and_curves_have_every_metric_by_name(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path)
    history.take(told(1, {"perplexity": 9.0, "accuracy": 0.25, "loss": 2.5}))
    history.take(told(2, {}))
    history.take(told(3, {"perplexity": math.inf, "accuracy": 0.5, "loss": 800.0}))
    (tmp_path / "run.toml").write_text("")

    run = edgefl.load_run(tmp_path)

    assert [row.metric for row in run.history] == ["perplexity"] * 3
    assert [row.metrics for row in run.history] == [
        {"perplexity": 9.0, "accuracy": 0.25},
        {},
        {"accuracy": 0.5},
    ]
    assert [(row.accuracy, row.loss) for row in run.history] == [(0.25, 2.5), (None, None), (0.5, 800.0)]
    np.testing.assert_array_equal(run.curves["perplexity"], [9.0, np.nan, np.nan])
    np.testing.assert_array_equal(run.curves["accuracy"], [0.25, np.nan, 0.5])


def test_a_row_of_an_older_run_is_one_of_accuracy(tmp_path: Path) -> None:
    import msgspec

    fields = msgspec.to_builtins(told(1, {"accuracy": 0.5, "loss": 1.0}))
    row = msgspec.convert(
        {key: value for key, value in fields.items() if key not in ("metric", "metrics")}, RoundClosed
    )
    assert (row.metric, row.metrics, row.accuracy) == ("accuracy", {}, 0.5)
