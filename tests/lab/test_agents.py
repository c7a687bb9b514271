"""`edgefl run --agents`: which algorithm is which device."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.config import parse
from edgefl.errors import ConfigError
from edgefl.lab import agents
from edgefl.lab.agents import command_of, dealt, parse_agents, with_agents
from edgefl.setup.tiers import completed, device_names

THREE = {
    "tiers": {
        name: {"cut": cut, "count": count} for name, cut, count in (("a", 0, 5), ("b", 1, 0), ("c", 2, 0))
    }
}


def test_kinds_and_counts_are_read() -> None:
    assert parse_agents("python:2,cpp:10, web") == {"python": 2, "cpp": 10, "web": 1}


@pytest.mark.parametrize(
    "text", ["", "python:", "python:0", "python:-1", "java:1", "web:1,web:2", "web:99999", "web:2.5"]
)
def test_what_is_no_agent_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="kinds are python, cpp, web"):
        parse_agents(text)


def test_agents_take_the_place_of_the_tiers_counts() -> None:
    federation = parse(THREE, source="a test")
    assert device_names(completed(with_agents(federation, {"python": 2, "web": 2}))) == [
        "a-0",
        "a-1",
        "b-0",
        "c-0",
    ]
    none = parse({"tiers": {"only": {}}}, source="a file without counts")
    assert device_names(completed(with_agents(none, {"web": 2}))) == ["only-0", "only-1"]
    assert completed(with_agents(federation, {"python": 3, "cpp": 3})).round.min_devices == 6


def test_each_tier_has_several_kinds() -> None:
    devices = ["a-0", "a-1", "b-0", "b-1", "c-0", "c-1"]
    found = dealt(devices, {"python": 2, "cpp": 2, "web": 2})
    assert found == dict(zip(devices, ["python", "cpp", "web"] * 2, strict=True))
    assert list(dealt(devices[:4], {"python": 1, "web": 3}).values()) == ["python", "web", "web", "web"]
    assert dealt(devices, {}) == {}


def test_an_agent_that_is_not_built_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="make agents-cpp"):
        command_of("cpp")
    with pytest.raises(ConfigError, match="make agents-web"):
        command_of("web")
    monkeypatch.setenv(agents.CPP_VARIABLE, str(tmp_path / "mine"))
    with pytest.raises(ConfigError, match=f"EDGEFL_AGENT_CPP names {tmp_path / 'mine'}"):
        command_of("cpp")
    (tmp_path / "agent.mjs").touch()
    monkeypatch.setenv(agents.WEB_VARIABLE, str(tmp_path / "agent.mjs"))
    with pytest.raises(ConfigError, match="there is no node"):
        command_of("web")


def test_an_agent_that_is_built_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    algorithm = tmp_path / "build" / "agents" / "cpp" / "edgefl-agent"
    algorithm.parent.mkdir(parents=True)
    algorithm.write_text("#!/bin/sh\n")
    algorithm.chmod(0o755)
    assert command_of("cpp") == [str(algorithm)]
    assert command_of("python")[1:] == ["-P", "-m", "edgefl", "device"]
