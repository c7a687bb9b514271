"""Options: one name for one meaning, with the same values and the same default in every command and in the Python API."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer

import edgefl
from benchmarks.__main__ import command_line
from edgefl.api.federation import with_options
from edgefl.cli.analysis import heterogeneity, personalize
from edgefl.cli.commands import app
from edgefl.cli.device import data, tune
from edgefl.cli.models import check, deploy, profile, verify
from edgefl.errors import ConfigError
from edgefl.setup.federation_options import FederationOptions
from tests.support.errors import refuses

MEANT = {
    "--batch": "samples of a step, of a call or of a round: a command has the default of its Python function",
    "--broker": "a server takes the broker of its federation file; a device has no file",
    "--broker-kind": "a run takes that of its federation file; `acl` knows brokers that edgefl does not start",
    "--data": "`check` also takes the name of a dataset",
    "--engine": "a device has one engine; `check` tries several",
    "--gamma": "`plan` compares several; `deploy` cuts one",
    "--id": "a device that adapts a model from files needs no name",
    "--kind": "`plan` compares several; `deploy` cuts one",
    "--out": "each command writes something else",
    "--port": "a broker and a mirror do not share a port",
    "--protocol": "`personalize` compares several; a device adapts by one",
    "--samples": "`deploy` estimates statistics, for which some thousand samples suffice",
    "--seed": "None is the seed of a federation file; commands without a file begin with 0",
    "--steps": "`personalize` draws a curve; `plan` takes the number of the algorithm",
    "--threads": "one thread gives comparable times and bits; agents and `tune` take what there is",
    "--tier": "`export` and `profile` take several; `deploy` and a device have one",
}
"""Options whose values or defaults differ between commands, with the reason."""
PLURALS = {"--device": "a number of devices, not their names", "--tier": "a text that describes all tiers"}
"""Options whose plural is an option too, with its meaning."""
OTHER_WORDS = {
    "--algorithm": ("--method", "--program"),
    "--batch": ("--batch-size",),
    "--bundle": ("--for",),
    "--data": ("--data-dir", "--dataset"),
    "--json": ("--as-json",),
    "--out": ("--into", "--output", "--output-dir", "--to"),
    "--processor": ("--accelerator", "--cuda", "--gpu"),
    "--repeat": ("--repetitions", "--times"),
    "--rounds": ("--n-rounds", "--num-rounds"),
    "--seed": ("--random-seed",),
    "--threads": ("--num-threads",),
}
"""Words for which edgefl has another one."""
FUNCTIONS = (
    (check.check, edgefl.check),
    (data.spread, edgefl.spread),
    (deploy.deploy, edgefl.deploy),
    (deploy.deploy, edgefl.DeployOptions),
    (heterogeneity.heterogeneity, edgefl.data.heterogeneity),
    (personalize.personalize, edgefl.personalize),
    (profile.profile, edgefl.Bundle.profile),
    (tune.tune, edgefl.tune),
    (verify.verify, edgefl.Bundle.verify),
)
"""Commands and the Python functions that they call."""
DIFFERENT_DEFAULTS = {"steps", "samples", "bn_eval"}
"""A text or an enumeration on the command line; a tuple, a number or a constant in Python."""


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every command with its path; a group that runs without a command is one."""
    if not hasattr(group, "commands") or group.invoke_without_command:
        yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{path} {name}".strip())


def options_of(command_line: typer.Typer) -> dict[str, dict[tuple[object, ...], list[str]]]:
    """The commands of each option, by what it takes."""
    found: dict[str, dict[tuple[object, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, command in commands(typer.main.get_command(command_line)):
        for option in command.params:
            if option.param_type_name == "option":
                takes = (
                    option.type_descriptor.annotation,
                    option.default,
                    option.metavar,
                    option.min,
                    option.max,
                )
                found[option.opts[0]][(*takes, option.multiple, option.envvar)].append(path)
    return found


OPTIONS = options_of(app)


def test_an_option_is_the_same_everywhere() -> None:
    different = {name: dict(takes) for name, takes in OPTIONS.items() if len(takes) > 1}

    assert {name: takes for name, takes in different.items() if name not in MEANT} == {}
    assert MEANT.keys() <= different.keys(), "no longer different"


def test_no_two_options_have_the_same_meaning() -> None:
    plurals = {name for name in OPTIONS if f"{name}s" in OPTIONS}
    benchmarks = options_of(command_line())

    assert plurals == PLURALS.keys()
    assert [each for words in OTHER_WORDS.values() for each in words if each in OPTIONS | benchmarks] == []


@pytest.mark.parametrize(
    ("command", "function"),
    FUNCTIONS,
    ids=[f"{command.__name__}-{each.__qualname__}" for command, each in FUNCTIONS],
)
def test_defaults_are_those_of_the_function(
    command: Callable[..., None], function: Callable[..., Any]
) -> None:
    def defaults(of: Callable[..., Any]) -> dict[str, object]:
        values = {name: each.default for name, each in inspect.signature(of).parameters.items()}
        return {
            name: value.value if isinstance(value, Enum) else value or None for name, value in values.items()
        }

    own, called = defaults(command), defaults(function)
    shared = (own.keys() & called.keys()) - DIFFERENT_DEFAULTS

    assert shared
    assert {name: own[name] for name in shared} == {name: called[name] for name in shared}


OWN: dict[str, dict[str, Any]] = {
    "federation.rounds": {"rounds": 2},
    "federation.seed": {"seed": 2},
    "data.dir": {"data": Path("digits")},
    "data.download": {"download": True},
    "model.name": {"model": "mlp"},
    "model.options.depth": {"model_options": ["depth=3"]},
    "algorithm.name": {"algorithm": "sgd"},
    "codec": {"codec": "dense"},
    "loss": {"loss": "huber"},
    "optimizer": {"optimizer": "sgd"},
    "downlink.encoding": {"downlink_encoding": "int8"},
    "broker.kind": {"broker_kind": "amqtt"},
    "tracking.tensorboard": {"tensorboard": True},
    "tracking.mlflow": {"mlflow": "http://127.0.0.1:5000"},
}
"""The option of its own that each of these keys has."""


@pytest.mark.parametrize("key", OWN)
def test_a_key_is_set_by_its_option_or_by_set_and_not_by_both(key: str) -> None:
    dotted = key if "." in key else f"{key}.name"
    assert FederationOptions(others=[f"{dotted}=7"]).settings == {dotted: 7}
    assert list(FederationOptions(**OWN[key]).settings) == [key]
    with refuses(ConfigError, key=dotted):
        _ = FederationOptions(**OWN[key], others=[f"{dotted}=7"]).settings


def test_every_option_with_a_key_is_tested() -> None:
    named = {name for options in OWN.values() for name in options}

    assert named | {"tiers", "engine", "others"} == {each.name for each in fields(FederationOptions)}


@pytest.mark.parametrize("options", [{"rho": 3}, {"rho": 3, "phi": 0.6}])
def test_the_demo_takes_the_codec_of_set(options: dict[str, float]) -> None:
    given = [f"codec.options.{key}={value}" for key, value in options.items()]
    chosen = with_options(None, FederationOptions(others=["codec.name=fedbat", *given])).codec

    assert (chosen.name, chosen.options) == ("fedbat", {"phi": 0.8} | options)


@pytest.mark.parametrize(
    ("texts", "key"),
    [
        (['federation={"seed": 3}'], "federation"),
        (["codec=null"], "codec"),
        (["model.name=null"], "model.name"),
        (["round.fraction=0.1", "round.fraction=0.2"], "round.fraction"),
    ],
)
def test_set_refuses_tables_nothing_and_two_values(texts: list[str], key: str) -> None:
    with refuses(ConfigError, key=key):
        _ = FederationOptions(others=texts).settings


def test_null_and_a_second_name_are_no_options() -> None:
    with refuses(ConfigError, key="rho"):
        _ = FederationOptions(codec="fedbat:rho=null").settings
    with refuses(ConfigError, algorithm="sgd:name=fedprox"):
        _ = FederationOptions(algorithm="sgd:name=fedprox").settings
