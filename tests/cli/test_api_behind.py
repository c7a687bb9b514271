"""The command line has no ability of its own: behind each command stands a function of the Python API."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import edgefl
from edgefl.cli.commands import app

API = {
    "run": "edgefl.api.run.prepare",
    "evaluate": "edgefl.api.run.evaluate",
    "statistics": "edgefl.statistics",
    "simulate": "edgefl.api.simulate.prepare_simulation",
    "broker": "edgefl_server.embedded_broker.run_amqtt",
    "acl": "edgefl_server.access.files.build_access_files",
    "server": "edgefl.Server",
    "mirror": "edgefl.mirror.serve.MirrorServer",
    "enroll token": "edgefl_server.identity.registry.Registry",
    "enroll request": "edgefl.wire.enrolment.signing_request",
    "enroll add": "edgefl.wire.enrolment.read_signing_request",
    "enroll ls": "edgefl_server.identity.registry.Registry",
    "enroll revoke": "edgefl_server.identity.registry.Registry",
    "enroll forget": "edgefl_server.identity.registry.Registry",
    "key new": "edgefl.wire.keys.KeyPair",
    "key show": "edgefl.wire.keys.KeyPair",
    "key rotate": "edgefl.wire.keys.rotate",
    "audit verify": "edgefl_server.storage.audit.verify",
    "dashboard": "edgefl_server.dashboard.web.serve.serve",
    "replay": "edgefl.analysis.replay.replay",
    "device": "edgefl.Agent",
    "data check": "edgefl.check_data",
    "data spread": "edgefl.spread",
    "device personalize": "edgefl.adapt",
    "device build-engine": "edgefl_device.engine.executorch.build.build_engine",
    "check": "edgefl.check",
    "plan": "edgefl.plan",
    "export": "edgefl.api.export.plan_export",
    "deploy": "edgefl.deploy",
    "verify": "edgefl.Bundle",
    "profile": "edgefl.Bundle",
    "tune": "edgefl.tune",
    "ls": "edgefl.catalog",
    "inspect": "edgefl.Bundle",
    "validate": "edgefl.config.reading.checked",
    "cache": "edgefl_export.compiler.cache.BundleCache",
    "heterogeneity": "edgefl.data.heterogeneity",
    "personalize": "edgefl.personalize",
}


def _commands(command: Any, name: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    if hasattr(command, "commands"):
        if name and command.callback and command.invoke_without_command:
            yield name, command.callback
        for child, each in command.commands.items():
            yield from _commands(each, f"{name} {child}".strip())
    else:
        assert command.callback is not None
        yield name, command.callback


COMMANDS = dict(_commands(typer.main.get_command(app)))


def test_every_command_has_an_api_call() -> None:
    assert set(API) == set(COMMANDS)


@pytest.mark.sample(20)
@pytest.mark.parametrize("command", sorted(API))
def test_the_command_calls_it(command: str) -> None:
    place, _, name = API[command].rpartition(".")
    behind = getattr(importlib.import_module(place), name)
    module = inspect.getmodule(inspect.unwrap(COMMANDS[command]))
    assert module is not None
    assert callable(behind)

    assert any(behind is each for each in _imported(module, set())), f"{module.__name__} goes around it"
    if place == "edgefl":
        assert name in edgefl.__all__


def _imported(module: ModuleType, seen: set[str]) -> Iterator[object]:
    """What a module of the command line imports by name, anywhere in it, and what those of its room do that it imports."""
    seen.add(module.__name__)
    for node in ast.walk(ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            source = importlib.import_module(node.module)
            things = [_named(source, alias.name) for alias in node.names]
            yield from things
            for each in (source, *things):
                if isinstance(each, ModuleType) and _of_the_cli(each) and each.__name__ not in seen:
                    yield from _imported(each, seen)


def _named(source: ModuleType, name: str) -> object:
    try:
        return getattr(source, name)
    except AttributeError:
        return importlib.import_module(f"{source.__name__}.{name}")  # a module that nobody loaded yet


def _of_the_cli(module: ModuleType) -> bool:
    return module.__name__.startswith("edgefl.cli.") and module.__name__ != "edgefl.cli.commands"
