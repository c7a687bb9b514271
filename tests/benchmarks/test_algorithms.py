"""`python -m benchmarks algorithms`: counts and bytes equal the specifications' tables."""

from __future__ import annotations

import json

import msgspec
import pytest

from benchmarks.algorithms import ADAPTIVE, FIGURES, ROUND, AlgorithmSettings, all_algorithms, measure, parse
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.errors import ConfigError
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from tests.benchmarks.commands import invoke

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
    with pytest.raises(ConfigError, match=r"lr.* -1"):
        measure(spec, "fedadam:server_lr=-1", COUNTS)
    with pytest.raises(ConfigError, match=r"optimizer 'fedadam'.*momentum"):
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
