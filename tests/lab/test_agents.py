"""`edgefl run --agents`: which algorithm is which device."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from edgefl.config import parse
from edgefl.lab import agents, broker
from edgefl.lab.agents import command_of, deal_agents, parse_agents, with_agents
from edgefl.lab.broker import free_port
from edgefl.lab.lab import Lab, ServerEvent
from edgefl.lab.processes import Supervisor
from edgefl.setup.tiers import completed, device_names
from tests.support.errors import ConfigError, EdgeflError, refuses
from tests.wire.mqtt.events import wait_until

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
    with refuses(ConfigError, agents=text):
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
    found = deal_agents(devices, {"python": 2, "cpp": 2, "web": 2})
    assert found == dict(zip(devices, ["python", "cpp", "web"] * 2, strict=True))
    assert list(deal_agents(devices[:4], {"python": 1, "web": 3}).values()) == ["python", "web", "web", "web"]
    assert deal_agents(devices, {}) == {}


def test_an_agent_that_is_not_built_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with refuses(ConfigError, kind="cpp"):
        command_of("cpp")
    with refuses(
        ConfigError, kind="web", missing=str(tmp_path / "agents" / "web" / "bin" / "edgefl-web-device.mjs")
    ):
        command_of("web")
    monkeypatch.setenv(agents.CPP_VARIABLE, str(tmp_path / "mine"))
    with pytest.raises(ConfigError, match=f"EDGEFL_AGENT_CPP names {tmp_path / 'mine'}"):
        command_of("cpp")
    (tmp_path / "agent.mjs").touch()
    monkeypatch.setenv(agents.WEB_VARIABLE, str(tmp_path / "agent.mjs"))
    with refuses(ConfigError, kind="web", program="node"):
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


# -- ports for brokers -------------------------------------------------------------------------------------


EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_no_outgoing_connection_is_given_the_port_of_a_broker() -> None:
    first = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 49_152

    assert all(1024 < free_port() < first for _ in range(50))


def test_a_port_that_is_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(broker, "_PORTS", range(port, port + 1))
        monkeypatch.setattr(broker, "_TRIES", 1)

        with refuses(ConfigError, host="127.0.0.1"):
            free_port()

    assert free_port() == port


def test_runs_that_start_together_choose_different_ports() -> None:
    assert len({free_port() for _ in range(20)}) > 15


# -- what the logs of supervised processes hold ------------------------------------------------------------


CHILD = """
import sys
print('{"event": "progress", "text": "", "step": 1}', flush=True)
print('{"event": "declined", "text": "row 2: no class is called wolf"}', flush=True)
print("error: the data do not fit", file=sys.stderr, flush=True)
print('{"event": "offline", "text": "goodbye"}', flush=True)
sys.exit(%d)
"""


def test_a_log_has_the_texts_of_a_process_and_the_error_is_its_own(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    code = ConfigError.exit_code
    supervisor.start_program("strong-0", [sys.executable, "-c", CHILD % code])
    log = tmp_path / "logs" / "strong-0.log"
    wait_until(lambda: "goodbye" in log.read_text(), "the last text")

    with pytest.raises(EdgeflError, match=r"strong-0 stopped with code .*: the data do not fit") as raised:
        wait_until(lambda: supervisor.check() != [], "the end")
    assert raised.value.exit_code == code
    lines = set(log.read_text().splitlines())
    assert lines == {
        "declined  row 2: no class is called wolf",
        "error: the data do not fit",
        "offline  goodbye",
    }


def test_a_run_says_which_row_a_device_refuses(tmp_path: Path) -> None:
    """The server gets a code alone, so that the text must come from the device's own process."""
    lab = Lab(parse({"tiers": {"strong": {"count": 1}}}, source="the test"), tmp_path)
    lab.supervisor.lines.put(("strong-0", b'{"event": "progress", "text": "", "step": 1}\n'))
    lab.supervisor.lines.put(("strong-0", b'{"event": "data", "text": "d.csv, line 3: no number"}\n'))
    said = next(lab.events(patience_s=300))

    assert (
        isinstance(said, ServerEvent)
        and said.event["text"] == "strong-0 refuses its data: d.csv, line 3: no number"
    )
