"""Names and options of a federation file against the shipped catalogs: all problems at once, without building anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from edgefl.config import checked, parse
from edgefl.config.names import name_problems
from edgefl.data.datasets import digits
from edgefl.errors import ConfigError, EdgeflError
from edgefl.setup.model import federation_model
from edgefl.setup.training import tiers_of


def test_every_problem_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(
        '[federation]\nrounds = 0\n[model]\nname = "resnet8"\noptions = { widht = 3 }\n'
        '[algorithm]\nname = "fafed"\nlrr = 0.1\n[optimizer]\nname = "adam"\n'
        '[codec]\nname = "fedpaq"\noptions = { bits = "3" }\n'
        '[tiers.weak]\nkind = "widht"\n[tiers.half]\nkind = "width"\ngama = 0.5\n'
    )
    with pytest.raises(ConfigError) as raised:
        checked(file)
    lines = raised.value.message.splitlines()[1:]
    keys = [line.split(":")[0].removeprefix("  - ") for line in lines]
    assert sorted(keys) == sorted(
        [
            "federation.rounds",
            "tiers.half.gama",
            "model.options.widht",
            "algorithm.lrr",
            "optimizer.name",
            "codec.options.bits",
            "tiers.weak.kind",
        ]
    )


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"model": {"name": "resnet9"}}, "model.name: no model 'resnet9'; there are: .*resnet8"),
        ({"model": {"name": "mlp", "bn": "static"}}, "model.bn: .*no batch norm mode"),
        (
            {"model": {"name": "mlp", "options": {"hidden": "wide"}}},
            "model.options.hidden: Expected .*found 'wide'",
        ),
        (
            {"model": {"name": "no_such_package.inner:make"}},
            "model.name: there is no module 'no_such_package'",
        ),
        ({"algorithm": {"name": "fedsgd"}}, "algorithm.name: no algorithm 'fedsgd'"),
        ({"algorithm": {"name": "fedadam"}}, "algorithm.name: 'fedadam' is an optimizer of the server"),
        ({"algorithm": {"name": "missing.py:make"}}, "algorithm.name: there is no file missing.py"),
        ({"algorithm": {"name": "no_such_package:make"}}, "algorithm.name: there is no module"),
        (
            {"algorithm": {"stepz": 3}},
            "algorithm.stepz: algorithm 'sgd' has no option 'stepz'; it takes batch",
        ),
        ({"algorithm": {"name": "per_fedavg", "mode": 3}}, "algorithm.mode: "),
        (
            {"optimizer": {"options": {"lr": 1.0}}},
            "optimizer.options: optimizer 'none' takes no options, found lr",
        ),
        ({"optimizer": {"name": "fedadam", "options": {"learning": 1}}}, "optimizer.options.learning: "),
        ({"codec": {"name": "fedbot"}}, "codec.name: no codec 'fedbot'; there are: .*fedbat"),
        (
            {"codec": {"name": "dense", "options": {"bits": 3}}},
            "codec.options.bits: codec 'dense' has no option",
        ),
        (
            {"codec": {"name": "fedbat"}, "algorithm": {"name": "fafed"}},
            "codec.name: 'fedbat' does not go with algorithm 'fafed'",
        ),
        (
            {"codec": {"name": "fedbat"}, "algorithm": {"rhoo": 6}},
            "algorithm.rhoo: algorithm 'fedbat' has no option",
        ),
        (
            {"tiers": {"a": {"gamma": 0.5}}},
            "tiers.a.gamma: submodel kind 'output_side' has no option 'gamma'",
        ),
        ({"tiers": {"a": {"kind": "width", "options": {"ratioo": 1}}}}, "tiers.a.options.ratioo: "),
        ({"tiers": {"a": {"cut": 99}}}, r"tiers.a.cut: a cut of resnet8 lies in 0\.\.\d.*found 99"),
        (
            {"tiers": {"a": {"cut": 2, "chunks": [["stem"], ["x"]]}}},
            "tiers.a.chunks: the chunks of cut 2 must list",
        ),
    ],
    ids=str,
)
def test_a_wrong_name_or_option_is_told_with_its_key(tables: dict[str, Any], told: str) -> None:
    assert re.search(told, "\n".join(name_problems(tables)))


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"model": {"name": "mlp", "options": {"hidden": [8, 4]}}, "tiers": {"a": {"cut": 2}}},
        {"algorithm": {"name": "per_fedavg", "mode": "hf", "personal": 0.1}},
        {"algorithm": {"name": "examples/feddyn.py:feddyn", "alpha": 0.1}},
        {"algorithm": {"name": "examples.feddyn:feddyn", "alpha": 0.1}},
        {"codec": {"name": "fedbat"}, "algorithm": {"batch": 8, "rho": 3.0}},
        {"codec": {"name": "zerofl", "options": {"sparse_training": False}}, "algorithm": {"name": "fafed"}},
        {"tiers": {"a": {"kind": "width", "options": {"gamma": 0.5, "rolling": True}}}},
        {"optimizer": {"name": "none"}},
        {"model": 3, "tiers": {"a": 5}, "codec": {"name": 7}},
    ],
    ids=str,
)
def test_what_is_right_or_no_name_at_all_is_left_alone(tables: dict[str, Any]) -> None:
    assert name_problems(tables) == []


def test_a_key_that_is_wrong_twice_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text('[algorithm]\nlr = "x"\n')
    with pytest.raises(ConfigError) as refusal:
        checked(file)
    keys = [line.strip().removeprefix("- ").partition(":")[0] for line in refusal.value.message.splitlines()]
    assert keys[1:] == ["algorithm.lr"]


@pytest.mark.parametrize(
    "tables",
    [
        {"algorithm": {"stepz": 3}},
        {"algorithm": {"name": "per_fedavg", "mode": 3}},
        {"codec": {"name": "fedpaq", "options": {"bits": "3"}}},
        {"codec": {"name": "fedbat"}, "algorithm": {"name": "fafed"}},
        {"tiers": {"a": {"cut": 99}}},
        {"tiers": {"a": {"kind": "width", "options": {"ratioo": 1}}}},
        {"optimizer": {"options": {"lr": 1.0}}},
        {"model": {"name": "mlp", "bn": "static"}},
    ],
    ids=str,
)
def test_what_is_told_here_is_refused_by_whoever_builds_it(tables: dict[str, Any]) -> None:
    assert name_problems(tables)
    tables = {"model": {"name": "mlp"}, **tables}
    dataset = digits().limited(train=4, test=4)
    with pytest.raises(EdgeflError):
        federation = parse(tables, source="the test")
        tiers_of(federation, federation_model(federation, dataset))


@pytest.mark.parametrize("given", ["3", '"weak-0"'])
def test_a_number_of_devices_where_names_belong_is_told_which_key_it_is(given: str, tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(f"[tiers.weak]\ndevices = {given}\n")
    with pytest.raises(ConfigError, match=r'tiers\.weak\.devices: .*like \["weak-\*"\].*`count`'):
        checked(file)


def test_a_file_of_windows_begins_with_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text("[federation]\nrounds = 3\n", encoding="utf-8-sig")

    assert checked(file).federation.rounds == 3
