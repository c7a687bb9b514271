"""`python -m benchmarks algorithms`: counts and bytes equal the specifications' tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.algorithms import ADAPTIVE, FIGURES, ROUND, AlgorithmSettings, all_algorithms, measure, parse
from benchmarks.coded_model import CodedModel
from benchmarks.encode import EncodeSettings, write_graph
from benchmarks.encode import measure as encode_measure
from benchmarks.submodels import SubmodelSettings, kinds_of, matched
from benchmarks.submodels import measure as submodels_measure
from benchmarks.workers.graph import load
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels import catalog
from edgefl.submodels.cost import cost, model_cost
from edgefl.wire import tensors
from tests.benchmarks.commands import invoke
from tests.rings.rows import mostly_slow
from tests.support.errors import ConfigError, ModelError, refuses

COUNTS = AlgorithmSettings(batch=4, steps=3, samples=10, repeat=0)
FEDDYN = "examples.feddyn:feddyn"


def _mlp() -> ModelSpec:
    return build_model("mlp", size=4, hidden=[9])


@pytest.mark.sample(4)
@pytest.mark.parametrize(("algorithm", "exchange"), FIGURES)
def test_what_an_algorithm_costs_is_what_its_specification_says(algorithm: str, exchange: str) -> None:
    rows = {row.exchange: row for row in measure(_mlp(), algorithm, COUNTS)}

    row, figures = rows[exchange], FIGURES[algorithm, exchange]
    assert (row.gradients_per_step, row.products_per_step) == (figures.gradients, figures.products)
    assert (row.up, row.down, row.kept) == (figures.up, figures.down, figures.kept)
    assert row.as_spec is True


@pytest.mark.parametrize(("algorithm", "copies"), [("fafed", 5), ("stem", 3)])
def test_training_holds_each_parameter_as_often_as_the_method_needs(algorithm: str, copies: int) -> None:
    """x_t, x_{t-1} and m, and of FAFED v and A: the server's state is not kept among the weights a second time."""
    row = measure(_mlp(), algorithm, COUNTS)[-1]

    step, schedules = 8, 2 * 4 * COUNTS.steps  # the int64 number of the step; eta and alpha of each
    assert row.state_bytes == copies * 4 * row.parameters + step + schedules


@pytest.mark.sample(4)
@pytest.mark.parametrize("algorithm", [algorithm for algorithm, exchange in FIGURES if exchange == ROUND])
def test_a_rounds_derivatives_are_those_of_its_steps(algorithm: str) -> None:
    row = measure(_mlp(), algorithm, COUNTS)[-1]

    assert row.gradients_per_round == COUNTS.steps * row.gradients_per_step
    assert row.products_per_round == COUNTS.steps * row.products_per_step


def test_everything_is_every_algorithm_of_the_catalog() -> None:
    names = [algorithm.partition(":")[0] for algorithm in all_algorithms()]

    assert set(names) == {*ALGORITHMS, *ADAPTIVE}
    assert len(set(all_algorithms())) == len(all_algorithms())
    assert {algorithm for algorithm, exchange in FIGURES if exchange == ROUND} <= set(all_algorithms())


def test_bytes_are_counted_in_tensors_of_the_round() -> None:
    spec = _mlp()
    [plain] = measure(spec, "sgd:momentum=0.0", COUNTS)
    [heavy] = measure(spec, "sgd", COUNTS)
    [dynamic] = measure(spec, f"{FEDDYN}:alpha=0.5", COUNTS)

    d = 4 * plain.parameters
    assert (plain.up_bytes, plain.down_bytes, plain.kept_bytes, plain.state_bytes) == (d, d, 0, d)
    assert (heavy.state_bytes, heavy.kept_bytes) == (2 * d, 0), "momentum lives for a round"
    assert (dynamic.state_bytes, dynamic.kept_bytes, dynamic.server_bytes) == (3 * d, d, d)
    assert dynamic.spec == "" and dynamic.as_spec is None


@pytest.mark.parametrize(
    ("name", "moments"),
    [("fedadam", 2), ("fedyogi", 2), ("fedadagrad", 2), ("fedams", 3), ("server_momentum", 1)],
)
def test_an_optimizer_of_the_server_costs_a_device_what_fedavg_does(name: str, moments: int) -> None:
    spec = _mlp()
    [plain] = measure(spec, "fedavg", COUNTS)
    [row] = measure(spec, name, COUNTS)

    kept = {"server": float(moments), "server_bytes": moments * 4 * plain.parameters}
    stated = {"spec": row.spec, "as_spec": row.as_spec}
    assert row == msgspec.structs.replace(plain, algorithm=name, **kept, **stated)


def test_an_optimizer_takes_its_options_beside_fedavgs() -> None:
    spec = _mlp()
    text = "fedadam:lr=0.1,server_lr=0.2,beta1=0.5,steps=2"

    [row] = measure(spec, text, COUNTS)

    assert (row.algorithm, row.gradients_per_round, row.server) == (text, 2, 2.0)
    with refuses(ConfigError, option="lr", value=-1):
        measure(spec, "fedadam:server_lr=-1", COUNTS)
    with refuses(ConfigError, unknown=["momentum"], accepted=["lr", "beta1", "beta2", "tau"]):
        measure(spec, "fedadam:momentum=0.9", COUNTS)


def test_moving_statistics_travel_and_count() -> None:
    settings = AlgorithmSettings(batch=4, steps=2, samples=8, repeat=0)
    [row] = measure(build_model("resnet8", widths=[2, 4, 4], size=8), "sgd", settings)

    assert row.up_bytes > 4 * row.parameters and row.up_bytes == row.down_bytes


def test_a_wrong_figure_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIGURES, ("sgd", ROUND), FIGURES["fafed", ROUND])  # type: ignore[arg-type]
    [row] = measure(_mlp(), "sgd", COUNTS)

    assert row.as_spec is False and row.spec == "2 | 3 3 1"


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("fafed", "fafed", {}),
        ("per_fedavg:mode=hf,alpha=0.1", "per_fedavg", {"mode": "hf", "alpha": 0.1}),
        (FEDDYN, FEDDYN, {}),
        (f"{FEDDYN}:alpha=0.5", FEDDYN, {"alpha": 0.5}),
    ],
)
def test_algorithms_are_written_with_their_options(text: str, name: str, options: dict[str, object]) -> None:
    assert parse(text) == (name, options)


@pytest.mark.slow
def test_the_command_times_steps_beside_fedavgs() -> None:
    arguments = ["--model", "mlp", "--option", "size=4", "--batch", "4", "--steps", "2", "--samples", "8"]
    chosen = ["--algorithm", "sgd", "--algorithm", "stem", "--repeat", "1"]
    ran = invoke("algorithms", *arguments, *chosen, "--json")

    assert ran.exit_code == 0, ran.output
    rows = json.loads(ran.stdout)["results"]
    places = [(row["algorithm"], row["exchange"], row["steps"]) for row in rows]
    assert places == [("sgd", "round", 2), ("stem", "opening", 2), ("stem", "round", 2)]
    for row in rows:  # stem's steps are numbered: more of them than a round has are timed all the same
        assert row["step_ms"] > 0 and row["step_ratio"] > 0 and row["peak_over_idle_bytes"] > 0


# -- `python -m benchmarks encode`: rows that can be trusted, from the graphs that devices run -------------


FIELDS = ["codec", "encode_ms", "step_ms", "ratio"]
SMALL = build_model("mlp", size=4, hidden=[9])


@pytest.mark.slow
def test_a_row_has_what_the_machine_and_people_ask_for() -> None:
    arguments = ["--model", "mlp", "--option", "size=4", "--batch", "4", "--repeat", "1"]
    ran = invoke("encode", *arguments, "--codec", "fedbat", "--json")

    assert ran.exit_code == 0, ran.output
    [row] = json.loads(ran.stdout)["results"]
    assert list(row)[: len(FIELDS)] == FIELDS
    assert (row["codec"], row["algorithm"], row["model"], row["batch"]) == ("fedbat", "fedbat", "mlp", 4)
    assert 0 < row["encode_ms_min"] <= row["encode_ms"] and 0 < row["step_ms_min"] <= row["step_ms"]
    assert row["ratio"] == pytest.approx(row["encode_ms"] / row["step_ms"], rel=0.02)
    assert row["sgd_ratio"] == pytest.approx(row["encode_ms"] / row["sgd_step_ms"], rel=0.02)
    assert row["encode_first_ms"] > 0 and row["calls"] >= 2


@pytest.mark.slow
def test_a_codec_of_plain_sgd_has_plain_sgds_step() -> None:
    row = encode_measure(SMALL, "topk:share=0.2", EncodeSettings(batch=2, repeat=1))

    assert row.algorithm == "sgd" and row.step_ms == row.sgd_step_ms and row.ratio == row.sgd_ratio


@pytest.mark.parametrize("codec", mostly_slow(["dense", "fedbat", "topk:share=0.2", "fedpaq"], ("fedbat",)))
def test_what_is_timed_is_the_whole_update_as_it_is_sent(codec: str, tmp_path: Path) -> None:
    model = CodedModel.of(SMALL, codec, batch=2)
    write_graph(tmp_path, "encode", model, model.algorithm.finish)

    encode = load(tmp_path, "encode", 1)
    first, second = encode(), encode()

    assert isinstance(first, bytes) and isinstance(second, bytes)
    sizes = {name: tensor.numel() for name, tensor in SMALL.weights.items()}
    wanted = model.form.arrays(sizes) or {name: ("float32", size) for name, size in sizes.items()}
    found = tensors.load(first)
    assert {name: (str(array.dtype), array.size) for name, array in found.items()} == wanted
    random = any(name.startswith("noise.") for name in model.algorithm.finish.inputs)
    assert (first != second) == random, "each call draws noise of its own"


def test_what_is_coded_has_been_trained(tmp_path: Path) -> None:
    model = CodedModel.of(SMALL, "topk:share=0.2", batch=2)
    write_graph(tmp_path, "encode", model, model.algorithm.finish)

    update = load(tmp_path, "encode", 1)()

    assert isinstance(update, bytes) and (tensors.load(update)["values"] != 0).mean() > 0.5


@pytest.mark.slow
def test_steps_go_on_from_each_other(tmp_path: Path) -> None:
    model = CodedModel.of(SMALL, "fedbat", batch=2)
    write_graph(tmp_path, "step", model, model.algorithm.phases[-1].function)

    step = load(tmp_path, "step", 1)

    assert step() is None and step() is None


# -- `python -m benchmarks submodels`: matched sizes, and rows with prediction beside measurement ----------


SUBMODELS_FIELDS = [
    *("kind", "gamma", "parameters", "macs", "download_bytes", "upload_bytes", "artifact_bytes"),
    *("peak_over_idle_bytes", "step_ms"),
]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "submodels", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_row_of_a_submodel_has_its_fields() -> None:
    arguments = ["--model", "mlp", "--kind", "width", "--gamma", "1/4", "--batch", "4", "--steps", "1"]
    ran = bench(*arguments, "--option", "size=14", "--json")

    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    [row] = told["results"]
    assert told["bench"] == "submodels" and list(row)[: len(SUBMODELS_FIELDS)] == SUBMODELS_FIELDS
    assert (row["kind"], row["gamma"], row["model"], row["algorithm"]) == ("width", 0.25, "mlp", "sgd")
    assert all(row[name] > 0 for name in SUBMODELS_FIELDS[2:])
    assert row["prediction_error"] == pytest.approx(
        row["predicted_bytes"] / row["peak_over_idle_bytes"] - 1, abs=1e-3
    )
    assert "submodel width, gamma 0.25, " in ran.stderr


@pytest.mark.slow
def test_an_importance_row_tells_executed_and_kept_macs() -> None:
    settings = SubmodelSettings(batch=4, steps=1)

    row = submodels_measure(build_model("mlp", size=8), "importance", 1 / 16, settings)

    assert row.algorithm == "tcbgd"
    assert 0 < row.kept_macs < 0.2 * row.macs
    assert row.upload_bytes < row.download_bytes
    assert row.round_peak_bytes >= row.peak_over_idle_bytes


@pytest.mark.slow
def test_a_rounds_memory_counts_frozen_chunks_as_fine_as_the_plans() -> None:
    """With one sample per step the forward pass, of 32 rows at once, is what needs most: 100 MB of tensors."""
    settings = SubmodelSettings(batch=1, steps=1)

    row = submodels_measure(build_model("resnet8", size=112), "output_side", 0.7, settings)

    assert row.options == {"cut": 3, "chunks": 3}
    assert row.round_graph == "forward"
    assert row.round_predicted_bytes > row.predicted_bytes


@pytest.mark.slow
def test_chunks_that_need_less_than_training_stay_as_they_are() -> None:
    """Training needs 40 MB more than the frozen chunk, so that what a process takes beside tensors does not decide."""
    settings = SubmodelSettings(batch=64, steps=1)

    row = submodels_measure(build_model("resnet8", size=48), "output_side", 0.95, settings)

    assert row.options == {"cut": 2}
    assert row.round_graph != "forward"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("gamma", "cut"),
    mostly_slow(
        [(1.0, 0), (0.95, 2), (0.7, 3), (1 / 4, 4), (1 / 64, 4)], [(1.0, 0), (0.95, 2), (0.7, 3), (1 / 64, 4)]
    ),
)
def test_the_cut_with_the_nearest_parameter_count_stands_for_gamma(gamma: float, cut: int) -> None:
    spec = build_model("resnet8")

    assert matched(spec, "output_side", gamma).options == {"cut": cut}


def test_every_kind_that_fits_the_model_is_measured() -> None:
    assert (
        {"output_side", "width", "importance"} <= set(kinds_of(build_model("resnet8"))) <= set(catalog.KINDS)
    )


@pytest.mark.parametrize("gamma", [0.0, 1.5, -0.25])
def test_a_gamma_outside_its_range_is_told(gamma: float) -> None:
    with pytest.raises(ModelError, match=r"gamma lies in \(0, 1\], found"):
        matched(build_model("mlp", size=4), "output_side", gamma)


@pytest.mark.slow
def test_one_that_cannot_be_measured_does_not_lose_the_others() -> None:
    cases = ["--kind", "early_exit", "--kind", "output_side", "--gamma", "1", "--batch", "2", "--steps", "1"]
    ran = invoke("submodels", "--model", "mlp", "--option", "size=4", *cases, "--json")

    assert ran.exit_code == ModelError.exit_code
    assert "mlp has no early exits" in " ".join(ran.stderr.split())
    assert [row["kind"] for row in json.loads(ran.stdout)["results"]] == ["output_side"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["width", "importance", "importance_structured", "output_side"])
def test_sizes_can_be_matched_by_their_multiplications(kind: str) -> None:
    spec = build_model("resnet8", size=8)
    macs = model_cost(spec)[1]
    by_macs, by_parameters = (
        cost(matched(spec, kind, 0.25, match).of(spec)) for match in ("macs", "parameters")
    )
    assert abs(by_macs.kept_macs / macs - 0.25) <= abs(by_parameters.kept_macs / macs - 0.25)
    assert by_macs.kept_macs / macs == pytest.approx(0.25, rel=0.35 if kind == "output_side" else 0.1)
