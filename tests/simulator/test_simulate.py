"""What a simulation leaves, how it goes on, and what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import edgefl
from edgefl.config import parse
from edgefl.config.rounds import SimulationTable
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.simulator.functions import record_function
from edgefl.simulator.results import RoundRow
from tests.e2e.inside import edgefl as command
from tests.rings.rows import mostly_slow
from tests.simulator.small import Stopped, federation, in_halves
from tests.support.errors import ConfigError, ParticipationError, StoreError, refuses


def test_its_folder_has_the_rounds_as_lines_and_as_a_table_and_the_model(tmp_path: Path) -> None:
    told: list[RoundRow] = []
    made = edgefl.simulate(federation(), tmp_path / "out", watch=told.append)

    lines = [json.loads(line) for line in (made.folder / "rounds.jsonl").read_text().splitlines()]
    with (made.folder / "rounds.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row.round for row in told] == [1, 2, 3] == [line["round"] for line in lines]
    assert [float(row["accuracy"]) for row in table] == [line["accuracy"] for line in lines]
    assert made.history == tuple(told) and made.finished
    assert made.federation.tiers["strong"].count == 4
    assert np.isfinite(made.curves["train_loss"]).all() and made.curves["up_bytes"].min() > 0
    assert {name.partition(".")[0] for name in made.model} == {"dense1", "head"}
    assert {path.name for path in made.folder.glob("*.svg")} == {"accuracy.svg", "loss.svg"}
    assert "training, mean over clients" in (made.folder / "loss.svg").read_text()
    picture = (made.folder / "accuracy.svg").read_text()
    assert f">{made.federation.federation.name}: accuracy<" in picture and ">chance<" in picture


@pytest.mark.parametrize(
    "kept",
    mostly_slow(
        ["", "state at clients and server", "int8 down", "in groups"], ["state at clients and server"]
    ),
)
def test_a_stopped_run_ends_the_same(kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.simulator.folder._SAVE_EVERY_S", 0.0)
    changes: dict[str, dict[str, object]] = {
        "": {"round": {"fraction": 0.5}},
        "state at clients and server": {
            "algorithm": {"name": "scaffold"},
            "tiers": {"weak": {"cut": 0, "count": 1}},
        },
        "int8 down": {"downlink": {"encoding": "int8"}},
        "in groups": {"simulation": {"together": 3}},
    }[kept]
    chosen = federation(**changes)
    whole = edgefl.simulate(chosen, tmp_path / "whole")
    halves = in_halves(2, chosen, tmp_path / "halves")

    assert [row.weights_sha256 for row in halves.history] == [row.weights_sha256 for row in whole.history]


@pytest.mark.slow
def test_one_that_was_stopped_before_anything_was_saved_begins_again(tmp_path: Path) -> None:
    whole = edgefl.simulate(federation(), tmp_path / "whole")
    halves = in_halves(2, federation(), tmp_path / "halves")

    assert [row.weights_sha256 for row in halves.history] == [row.weights_sha256 for row in whole.history]


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["sgd", "scaffold", "per_fedavg", "fafed"])
def test_clients_together_are_the_clients_one_by_one(algorithm: str, tmp_path: Path) -> None:
    tiers: dict[str, object] = {"all": {"count": 5}}
    chosen = federation(algorithm={"name": algorithm})
    apart = chosen.model_copy(update={"tiers": parse({"tiers": tiers}, source="the test").tiers})
    grouped = apart.model_copy(update={"simulation": SimulationTable(together=2)})
    one, other = edgefl.simulate(apart, tmp_path / "apart"), edgefl.simulate(grouped, tmp_path / "together")

    for name, weights in one.model.items():
        np.testing.assert_allclose(other.model[name], weights, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_slow_and_lost_clients_cost_a_round_its_time_and_their_updates(tmp_path: Path) -> None:
    speeds: dict[str, object] = {"step_ms": 100.0, "up_mbit": 1.0, "spread": 1.0}
    quick = edgefl.simulate(federation(simulation=speeds), tmp_path / "quick")
    limits: dict[str, object] = {"round_deadline_s": 5.0}
    lossy = federation(simulation={"dropout": 0.4}, limits=limits, federation={"rounds": 6})
    lost = edgefl.simulate(lossy, tmp_path / "lossy")

    assert {row.reports for row in quick.history} == {6} and min(quick.curves["simulated_s"]) > 0.2
    assert len({row.simulated_s for row in quick.history}) == 1  # the same slowest client each time
    assert 6 < lost.curves["reports"].sum() < 36
    assert [row.simulated_s for row in lost.history if row.reports < 6] == [5.0] * sum(
        row.reports < 6 for row in lost.history
    )


@pytest.mark.slow
def test_a_rounds_energy_includes_lost_clients(tmp_path: Path) -> None:
    speeds: dict[str, object] = {"step_ms": 500.0, "watts": 3.0, "tiers": {"weak": {"step_ms": 1000.0}}}
    limits: dict[str, object] = {"round_deadline_s": 1.5}
    made = edgefl.simulate(federation(simulation=speeds), tmp_path / "all")
    late = edgefl.simulate(federation(simulation=speeds, limits=limits), tmp_path / "late")
    with (made.folder / "rounds.csv").open() as file:
        table = [float(row["energy_j"]) for row in csv.DictReader(file)]

    # Two steps each: four clients take a second and two take two of them.
    assert table == pytest.approx([3.0 * (4 * 1.0 + 2 * 2.0)] * 3)
    assert made.curves["energy_j"].tolist() == table
    assert {row.reports for row in late.history} == {4}  # the two are cut off at the deadline, still training
    assert late.curves["energy_j"].tolist() == pytest.approx([3.0 * (4 * 1.0 + 2 * 1.5)] * 3)


@pytest.mark.slow
def test_who_is_late_is_not_waited_for_where_more_were_selected(tmp_path: Path) -> None:
    speeds: dict[str, object] = {"step_ms": 100.0, "spread": 1.5}
    chosen: dict[str, object] = {"fraction": 0.5, "over_selection": 2.0}
    made = edgefl.simulate(federation(simulation=speeds, round=chosen), tmp_path / "some")
    every = edgefl.simulate(federation(simulation=speeds), tmp_path / "all")

    assert {(row.selected, row.reports) for row in made.history} == {(6, 3)}
    assert made.history[0].simulated_s < every.history[0].simulated_s


def test_a_resume_with_another_configuration_says_which_key(tmp_path: Path) -> None:
    edgefl.simulate(federation(federation={"rounds": 1}), tmp_path)
    with refuses(ConfigError, path=str(tmp_path), changes=["federation.seed was 0, is 5"]):
        edgefl.simulate(federation(federation={"rounds": 1, "seed": 5}), tmp_path, resume=True)
    with pytest.raises(ConfigError, match="`resume` continues it"):
        edgefl.simulate(federation(federation={"rounds": 1}), tmp_path)


@pytest.mark.slow
def test_a_run_killed_at_its_start_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise Stopped

    whole = edgefl.simulate(federation(), tmp_path / "whole")
    monkeypatch.setattr("edgefl.simulator.carries.CarryStore.standing", property(killed))
    with pytest.raises(Stopped):
        edgefl.simulate(federation(), tmp_path / "out")
    monkeypatch.undo()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.toml.partial").write_text("[feder")

    for out in ("out", "half"):
        made = edgefl.simulate(federation(), tmp_path / out, resume=True)
        assert made.history[-1].weights_sha256 == whole.history[-1].weights_sha256


def test_a_state_that_is_damaged_is_named(tmp_path: Path) -> None:
    edgefl.simulate(federation(federation={"rounds": 1}), tmp_path)
    (tmp_path / "state.sqlite").write_bytes(b"no database, but long enough for a header" * 99)
    with refuses(StoreError, path=str(tmp_path / "state.sqlite")):
        edgefl.simulate(federation(federation={"rounds": 1}), tmp_path, resume=True)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with refuses(ConfigError, path=str(tmp_path), missing="config.toml"):
        edgefl.simulate(federation(), tmp_path, fresh=True)
    assert (tmp_path / "thesis.txt").exists()


def test_fewer_clients_than_a_round_needs_are_named(tmp_path: Path) -> None:
    with refuses(ParticipationError, needed=9):
        edgefl.simulate(federation(round={"min_reports": 9}), tmp_path)


def test_the_command_prints_a_line_for_each_round_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text('[model]\nname = "mlp"\noptions = { hidden = [8] }\n[data]\nname = "digits"\n')
    changes = "--rounds", "2", "--set", "algorithm.steps=1", "--set", "tiers.all.count=2"
    arguments = (file, *changes, "--out", tmp_path / "out")
    ran = command("simulate", *arguments, "--json")

    assert ran.returncode == 0, ran.stderr
    assert [line["round"] for line in ran.events()] == [1, 2]
    again = command("simulate", *arguments)
    assert again.returncode == ConfigError.exit_code and "--resume continues it" in again.stderr


def test_a_function_for_one_client_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(inputs: Tensors) -> Tensors:
        return {"record.x": inputs["batch.0.x"].sum(0)}

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no batching rule")

    monkeypatch.setattr(torch.func, "vmap", refuse)
    function = Function("own", fn, {"batch.0.x": TensorSpec((3,), torch.float32)})
    with refuses(ConfigError, function="own", clients=4):
        record_function(function, 4)


@pytest.mark.slow
def test_models_of_rounds_stay_where_they_are_asked_for(tmp_path: Path) -> None:
    made = edgefl.simulate(
        federation(simulation={"keep_every": 2}, federation={"rounds": 4}), tmp_path / "out"
    )

    assert list(made.kept) == [2, 4]
    assert made.kept[4].read_bytes() == (made.folder / "model.safetensors").read_bytes()
    assert made.kept[2].read_bytes() != made.kept[4].read_bytes()

    again = edgefl.simulate(federation(), tmp_path / "out", fresh=True)
    assert not again.kept


@pytest.mark.slow
def test_who_is_absent_holds_samples_and_never_takes_part(tmp_path: Path) -> None:
    some = edgefl.simulate(federation(simulation={"absent": ["weak-*"]}), tmp_path / "some")
    every = edgefl.simulate(federation(), tmp_path / "all")

    present = sum(tier.count for name, tier in some.federation.tiers.items() if name != "weak")
    assert 0 < present < every.history[0].reports
    assert {(row.selected, row.reports) for row in some.history} == {(present, present)}


@pytest.mark.slow
def test_a_collapsed_round_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning rate is too high: from round 4 on accuracy falls."""
    monkeypatch.setattr("edgefl.simulator.folder._SAVE_EVERY_S", 0.0)
    chosen = federation(
        federation={"rounds": 5, "seed": 7},
        algorithm={"lr": 1.0, "batch": 8, "steps": 4},
        round={"rollback_accuracy": 0.02},
    )
    whole = edgefl.simulate(chosen, tmp_path / "whole").history
    halves = in_halves(3, chosen, tmp_path / "halves").history

    assert [row.outcome for row in whole] == ["closed"] * 3 + ["abandoned"] * 2
    assert {row.weights_sha256 for row in whole[2:]} == {whole[2].weights_sha256}
    assert "more than 0.02 below the best so far" in whole[3].text
    assert [(row.outcome, row.accuracy, row.text, row.weights_sha256) for row in halves] == [
        (row.outcome, row.accuracy, row.text, row.weights_sha256) for row in whole
    ]
