"""`edgefl-agent` is started by the line that starts `edgefl device`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import typer.main

import edgefl
from edgefl.cli.commands import app
from edgefl.lab.agents import CPP, CPP_VARIABLE, command_of
from tests.agents.cpp.build import program
from tests.docs.documents import DOCS, blocks
from tests.support.commands import run_command


def told(*words: str) -> str:
    ran = run_command(program("edgefl-agent"), *words, timeout=60)
    return ran.stdout + ran.stderr


def test_it_knows_every_option_of_edgefl_device() -> None:
    command: Any = typer.main.get_command(app)
    options = [
        name for each in command.commands["device"].params for name in (*each.opts, *each.secondary_opts)
    ]
    unknown = [
        name for name in [*options, "--tls"] if "not expected" in told("--id", "a", "--data", "b", name)
    ]

    assert len(options) > 20
    assert unknown == ["--tls"]


def test_the_page_names_options_that_there_are() -> None:
    known = told("--help")
    lines = [line for block in blocks(DOCS / "agents" / "cpp.md", "sh") for line in block.text.splitlines()]
    words = [
        word for line in lines if "/edgefl-agent" in line for word in line.split() if word.startswith("--")
    ]

    assert words
    assert [word for word in words if f"{word} " not in known] == []


def test_it_tells_the_project_s_version() -> None:
    assert told("--version").strip() == f"edgefl-agent {edgefl.__version__}"


def test_a_run_finds_the_agent_that_a_checkout_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    if "EDGEFL_CPP_BUILD" in os.environ:
        pytest.skip("the agent was built elsewhere (EDGEFL_CPP_BUILD)")
    built = program("edgefl-agent")
    monkeypatch.delenv(CPP_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "")

    assert command_of(CPP) == [str(built)]
