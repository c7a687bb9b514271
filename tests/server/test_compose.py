"""From a federation file to a plan, with real exports of a small model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.cli.federation.live import RunView
from edgefl.cli.federation.serving import _say
from edgefl.config import Federation, TierTable, parse
from edgefl.data.datasets import digits
from edgefl.lab.lab import ServerEvent
from edgefl.objective.objective import Objective
from edgefl.setup.evaluation import evaluation
from edgefl.setup.model import federation_model
from edgefl.setup.training import replaced_algorithm
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.bundle.archive import read_bundle
from edgefl_export.compiler.cache import CompiledBundle
from edgefl_export.compiler.request import TierTraining
from edgefl_export.memory.recompute import Budget
from edgefl_server.compose import _rules, compose
from edgefl_server.coordinator.roster import tier_of
from edgefl_server.events import Compiled, Event, Exporting, Noted, Warned
from edgefl_server.hyperparameters import round_hyperparameters, shared_hyperparameters
from edgefl_server.run_spec import DownlinkSpec, RunSpec
from tests.support.arrays import weights_of
from tests.support.errors import ConfigError, ModelError, refuses
from tests.support.listeners import CallingListener

DATASET = digits().limited(train=40, test=70)


def federation(**changes: Any) -> Federation:
    tables: dict[str, Any] = {
        "federation": {"name": "composed", "rounds": 10, "seed": 3},
        "model": {"name": "mlp", "options": {"hidden": [6, 5]}},
        "algorithm": {"batch": 4, "steps": 2, "lr": 0.2},
        "data": {"name": "digits"},
        "round": {"lr_decay_at": [0.5, 0.8], "weighting": "samples", "min_devices": 2, "count": "nonzero"},
        "tiers": {"strong": {"devices": ["big-*"]}, "weak": {"cut": 1, "memory_bytes": 1 << 26, "count": 2}},
    }
    for key, value in changes.items():
        tables[key] = {**tables.get(key, {}), **value}
    return parse(tables, source="the test")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("composed")


@pytest.fixture(scope="module")
def plan(out: Path) -> RunSpec:
    return compose(federation(), DATASET, out)


@pytest.fixture
def compiled(plan: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled: a tier's bundle is that of the tier of this name in ``plan``, whatever it should be."""

    def bundle_of(_: Federation, __: Any, tier: TierTraining, *___: Any, **____: Any) -> CompiledBundle:
        return CompiledBundle(plan.tiers[tier.name].bundle, from_cache=True)

    monkeypatch.setattr("edgefl_server.compose.bundle_of", bundle_of)


def test_a_plan_holds_what_the_file_says(plan: RunSpec) -> None:
    rules = plan.rules
    assert (rules.seed, rules.rounds, rules.min_devices, rules.weighted) == (3, 10, 2, True)
    assert [(tier.name, tier.patterns, tier.memory_bytes) for tier in rules.tiers] == [
        ("strong", ("big-*",), 0),
        ("weak", (), 1 << 26),
    ]
    assert plan.count == "nonzero"
    held = {tier: part.place(plan.initial, 1).regions.keys() for tier, part in plan.tiers.items()}
    assert plan.initial.keys() == held["strong"] > held["weak"]
    assert {name.partition(".")[0] for name in plan.initial} <= set(plan.units)


def test_the_learning_rate_decays_at_fractions_of_the_rounds(plan: RunSpec) -> None:
    rates = [round_hyperparameters(plan, number, 0)["lr"] for number in range(1, 11)]
    np.testing.assert_allclose(rates, [0.2] * 5 + [0.02] * 3 + [0.002] * 2)


def test_a_schedule_follows_completed_exchanges(plan: RunSpec) -> None:
    scheduled = replace(plan, schedule=lambda position, rounds: {"lr": 1.0, "left": float(rounds - position)})
    assert (
        round_hyperparameters(scheduled, 1, 0)["left"] == 10.0
        and round_hyperparameters(scheduled, 9, 3)["left"] == 7.0
    )
    assert round_hyperparameters(scheduled, 9, 3)["lr"] == 1.0, (
        "what an algorithm schedules is not decayed beside it"
    )


def test_bundles_are_compiled_once(plan: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEFL_CACHE", str(tmp_path / "cache"))
    said: list[Event] = []
    for folder in ("first", "second"):
        made = compose(federation(), DATASET, tmp_path / folder, listener=CallingListener(said.append))
        for tier in plan.tiers:
            assert made.tiers[tier].bundle == plan.tiers[tier].bundle
            assert read_bundle(tmp_path / folder / "bundles" / f"{tier}.efl") == plan.tiers[tier].bundle
    assert {event.tier for event in said if isinstance(event, Exporting)} == {"strong", "weak"}
    first, second = (event for event in said if isinstance(event, Compiled))
    assert (first.compiled, first.reused, second.compiled, second.reused) == (2, 0, 0, 2)
    assert said[-1] == second and second.cache == str(tmp_path / "cache") and second.cache_bytes > 0


@pytest.mark.usefixtures("compiled")
def test_the_live_view_says_once_where_bundles_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    event = msgspec.to_builtins(Compiled(compiled=1, reused=2, cache="folder", cache_bytes=3 << 20))
    with RunView(federation(), ["weak-1"], {}, live=True) as view:
        for _ in range(2):
            view.take(ServerEvent(event))
    assert capsys.readouterr().out.count("bundles: 2 from the cache, 1 compiled (folder, 3.0 MiB)") == 1


@pytest.mark.usefixtures("compiled")
def test_a_tier_that_asks_for_too_little_memory_is_named(tmp_path: Path) -> None:
    said: list[Event] = []
    made = compose(
        federation(tiers={"weak": {"cut": 1, "memory_bytes": 5}}),
        DATASET,
        tmp_path,
        listener=CallingListener(said.append),
    )

    [warned] = [event for event in said if isinstance(event, Warned)]
    needed = max(graph.planned_bytes for graph in made.tiers["weak"].bundle.manifest.of_round)
    assert warned.tier == "weak"
    assert "asks devices for 5 bytes" in warned.text and f"needs {needed:,}" in warned.text


@pytest.mark.usefixtures("compiled")
def test_a_tier_that_is_dead_at_the_start_is_named_and_trained(tmp_path: Path) -> None:
    config = federation(
        model={"options": {"hidden": [64, 16]}},
        algorithm={"name": "tcbgd"},
        tiers={"weak": {"kind": "importance", "gamma": 0.02}},
    )
    said: list[Event] = []

    made = compose(config, DATASET, tmp_path, listener=CallingListener(said.append))

    (warned,) = (event for event in said if isinstance(event, Warned))
    assert warned.tier == "weak" and made.tiers.keys() == {"strong", "weak"}
    assert re.search(
        r"tier 'weak'.*gamma 0\.02.*dense1\.dense\.weight.*keep nothing.*strategy = ", warned.text
    )
    assert msgspec.json.decode(msgspec.json.encode(warned)) == {
        "event": "warned",
        "tier": "weak",
        "text": warned.text,
    }


def test_a_dead_tier_is_shown_by_server_and_live_view(capsys: pytest.CaptureFixture[str]) -> None:
    warned = Warned(tier="weak", text="tier 'weak' is [dead]")
    _say(warned)
    assert "tier 'weak' is [dead]" in capsys.readouterr().out
    event = msgspec.to_builtins(warned)
    with RunView(federation(), ["weak-1"], {}, live=True) as view:
        for _ in range(2):
            view.take(ServerEvent(event))
    assert capsys.readouterr().out.count("tier 'weak' is [dead]") == 1


@pytest.mark.usefixtures("compiled")
def test_a_codec_that_brings_its_own_training_says_once_what_it_replaces(tmp_path: Path) -> None:
    said: list[Event] = []
    compose(federation(codec={"name": "fedbat"}), DATASET, tmp_path, listener=CallingListener(said.append))
    (noted,) = (event for event in said if isinstance(event, Noted))
    assert "codec 'fedbat'" in noted.text and "'fedbat' in place of 'sgd'" in noted.text
    assert not replaced_algorithm(federation(codec={"name": "fedbat"}, algorithm={"name": "fedbat"}))
    assert not replaced_algorithm(federation(codec={"name": "fedpaq"}))


def test_an_unknown_option_names_the_known_ones(tmp_path: Path) -> None:
    with refuses(ConfigError, unknown=["stepz"], accepted=...):
        compose(federation(algorithm={"stepz": 3}), DATASET, tmp_path)


def test_a_scalar_that_tiers_do_not_agree_on_is_refused() -> None:
    algorithm = sgd(_objective(), lr=0.5)
    assert shared_hyperparameters({"strong": algorithm, "weak": replace(algorithm, hyper={"rho": 6.0})}) == {
        "lr": 0.5,
        "rho": 6.0,
    }
    with refuses(ConfigError, algorithm="sgd", tier="weak"):
        shared_hyperparameters({"strong": algorithm, "weak": replace(algorithm, hyper={"lr": 0.25})})


@pytest.mark.usefixtures("compiled")
def test_a_damaged_bundle_in_the_folder_is_written_again(plan: RunSpec, out: Path) -> None:
    path = out / "bundles" / "weak.efl"
    path.write_bytes(path.read_bytes()[:100])
    compose(federation(), DATASET, out)
    assert read_bundle(path) == plan.tiers["weak"].bundle


@pytest.mark.usefixtures("compiled")
def test_a_plan_has_the_downlink_and_the_trained_weights(tmp_path: Path) -> None:
    told = {"encoding": "int8", "keyframe_every": 7, "compression": "none"}
    model = {"name": "resnet8", "options": {"widths": [4, 4, 4]}}
    config = federation(downlink=told, model=model, tiers={"weak": {"cut": 0}})
    made = compose(config, DATASET, tmp_path)
    assert made.downlink == DownlinkSpec("int8", 7, "none")
    kept = {name.rpartition(".")[2] for name in made.initial.keys() - made.trained}
    assert kept == {"running_mean", "running_var"} and made.trained < made.initial.keys()


def test_the_seed_decides_the_initial_weights(plan: RunSpec) -> None:
    same = federation_model(federation(), DATASET).weights
    other = federation_model(federation(federation={"seed": 4}), DATASET).weights
    assert all(np.array_equal(plan.initial[name], same[name].numpy()) for name in same)
    assert any(not torch.equal(same[name], other[name]) for name in same)


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_only_float32_can_be_rounded(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = federation_model(federation(), DATASET)
    spec.module.half()
    monkeypatch.setattr("edgefl_server.compose.federation_model", lambda *_: spec)
    with refuses(ModelError, name="dense1.dense.weight", encoding="float32"):
        compose(federation(downlink={"encoding": encoding}), DATASET, tmp_path)


def test_counting_with_rounded_tiers_is_refused(tmp_path: Path) -> None:
    tiers = {"half": {"kind": "width", "gamma": 0.5, "devices": ["half-*"]}}
    with refuses(ConfigError, encoding="int8"):
        compose(federation(downlink={"encoding": "int8"}, tiers=tiers), DATASET, tmp_path)


@pytest.mark.slow
def test_a_memory_budget_reaches_the_steps_of_its_tier(tmp_path: Path) -> None:
    config = federation(tiers={"strong": {"memory_budget": "64MiB"}})

    compose(config, DATASET, tmp_path)

    found = {
        tier: {graph.name: graph.memory_budget for graph in read_bundle(tmp_path / file).manifest.graphs}
        for tier, file in (("strong", "bundles/strong.efl"), ("weak", "bundles/weak.efl"))
    }
    assert {name for name, budget in found["strong"].items() if budget} == {"train"}
    assert found["strong"]["train"] == 64 * 2**20 and not any(found["weak"].values())


@pytest.mark.parametrize("text", ["much", "0", "0%", " ", "12 parsec", "-3MiB"])
def test_a_memory_budget_that_is_none_is_told_when_the_file_is_read(text: str) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.weak\.memory_budget: .*48MiB or a share such as 50%"):
        federation(tiers={"weak": {"memory_budget": text}})


@pytest.mark.parametrize("text", ["", "64MiB", "60 %", "1.5 gb", "1000B"])
def test_a_federation_file_takes_what_the_exporter_takes(text: str) -> None:
    table = federation(tiers={"weak": {"memory_budget": text}}).tiers["weak"]

    assert table.memory_budget == text
    assert not text or Budget.parse(text).count > 0


def test_a_batch_norm_mode_that_the_model_does_not_have_is_named() -> None:
    for name in ("mlp", "cnn", "some.module:factory"):
        with refuses(ConfigError, model=name, bn="static"):
            federation_model(federation(model={"name": name, "bn": "static", "options": {}}), DATASET)


def test_a_plain_tier_takes_the_devices_of_its_name(plan: RunSpec, tmp_path: Path) -> None:
    tables = {
        "plain": TierTable(),
        "by_memory": TierTable(memory_bytes=5),
        "named": TierTable(devices=("a", "b-*")),
    }
    rules = _rules(federation(), tables, sgd(_objective())).tiers
    assert [rule.patterns for rule in rules] == [("plain-*",), (), ("a", "b-*")]
    assert [tier_of(rules, name, 1) for name in ("plain-3", "b-1", "other")] == ["plain", "named", "plain"]


@pytest.mark.parametrize("bn", ["global", "static"])
def test_evaluation_is_inference_of_the_whole_model_on_all_test_samples(bn: str) -> None:
    spec = federation_model(
        federation(model={"name": "resnet8", "bn": bn, "options": {"widths": [4, 4, 4]}}), DATASET
    )
    weights = weights_of(spec)
    found = evaluation(spec, sgd(Objective.of(OutputSide(spec, 0))), DATASET, "cpu")(weights)
    with torch.inference_mode():
        logits = spec.module.eval()(torch.from_numpy(DATASET.read(DATASET.test_x)))
    labels = torch.from_numpy(DATASET.test_y)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert found["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)


def test_a_model_that_does_not_fit_the_data_is_named(tmp_path: Path) -> None:
    with refuses(ConfigError, model="mlp", data=...):
        compose(federation(model={"options": {"size": 9}}), DATASET, tmp_path)


def test_labels_of_another_kind_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_answers.py").write_text(ANSWERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"labels of shape \(10,\) and type torch\.float32.* one class number"
    ):
        compose(federation(model={"name": "my_answers:model", "options": {}}), DATASET, tmp_path)


ANSWERS = """
from dataclasses import replace
from edgefl.models.zoo.basic import mlp
from edgefl.models.losses import BinaryCrossEntropy
def model(in_channels, size, classes):
    return replace(mlp(in_channels=in_channels, size=size, classes=classes), loss=BinaryCrossEntropy())
"""


def test_a_tensor_name_with_a_tilde_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tilde.py").write_text(TILDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with refuses(ModelError, name="head~a.weight"):
        compose(federation(model={"name": "my_tilde:model", "options": {}}), DATASET, tmp_path)
    assert not (tmp_path / "bundles").exists()


TILDE = """
from torch import nn
from edgefl.models.spec import ModelSpec, sequential
from edgefl.contract.algorithm import TensorSpec
def model(in_channels, size, classes):
    units = [("flat", nn.Flatten()), ("head~a", nn.Linear(in_channels * size * size, classes))]
    return ModelSpec("tilde", sequential(units), TensorSpec((in_channels, size, size)), classes)
"""


@pytest.mark.parametrize("count", ["", "some"])
def test_an_unknown_way_to_count_names_the_known_ones(count: str) -> None:
    assert federation(round={"count": "holders"}).round.count == "holders"
    with pytest.raises(ConfigError, match=r"round\.count: .*'holders' or 'nonzero'"):
        federation(round={"count": count})


def test_an_algorithm_that_needs_every_device_refuses_a_sample_of_them() -> None:
    tables = {"strong": TierTable()}
    everyone = replace(sgd(_objective()), whole=True, opening=(sgd(_objective()),))
    rules = _rules(federation(round={"absent": "refuse"}), tables, everyone)
    assert (rules.whole, rules.absent, rules.opening) == (True, "refuse", 1)
    with pytest.raises(ConfigError, match=r"needs every device in every round, and round.fraction is 0.5"):
        _rules(federation(round={"fraction": 0.5}), tables, everyone)


def _objective() -> Objective:
    return Objective.of(OutputSide(federation_model(federation(), DATASET), 0))
