"""A C++ agent that is told nonsense, has no disk, or finds nobody: it says what is wrong, and loses nothing."""

from __future__ import annotations

import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.agents.cpp.build import program
from tests.agents.cpp.conftest import StartAgent
from tests.agents.cpp.processes import CppAgent
from tests.device_runtime import tiny
from tests.device_runtime.agent.scripted import ScriptedServer, write_data
from tests.device_runtime.tiny import World
from tests.support.commands import run_command
from tests.wire.mqtt.events import PATIENCE_S

NOBODY = "127.0.0.1:9"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path)


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--id", "a/b"], 2, "device 'a/b' is not usable"),
        (["--memory", "64"], 2, "--memory: '64' has no unit; write 64MiB"),
        (["--limit", "fetch_window=0"], 2, "'fetch_window=0' should be a whole number from 1"),
        (["--limit", "speed=1"], 2, "names no limit"),
        (["--server-key", "abc"], 2, "64 hexadecimal digits"),
        (["--token", "efl1.secret"], 2, "--token is a secret"),
        (["--token", "@/nowhere"], 2, "/nowhere cannot be read"),
        (["--token-file", "/nowhere", "--token", "@/nobody"], 2, "/nobody cannot be read"),
        (["--engine", "tflite"], 2, "tflite"),
        (["--policy", "rules.toml"], 2, "--policy is an option of `edgefl device`"),
        (["--broker", "user:secret@localhost"], 2, "EDGEFL_BROKER_PASSWORD"),
        (["--data", "/nowhere.npz"], 3, "/nowhere.npz"),
        (["--broker", "localhost:99999"], 7, "up to 65535"),
        (["--broker", "wss://localhost/mqtt"], 7, "not by WebSocket"),
        (["--cert-file", "device.crt"], 7, "a client certificate is two files"),
        (["--ca-file", "/nowhere.crt"], 7, "there is no file /nowhere.crt"),
        (["--store", "/proc/nowhere"], 11, "/proc/nowhere"),
    ],
)
def test_what_cannot_be_used_is_named_and_has_the_exit_code_of_edgefl(
    tmp_path: Path, data: Path, options: list[str], code: int, text: str
) -> None:
    named = {"--id": "phone", "--data": str(data), "--store": str(tmp_path / "store"), "--broker": NOBODY}
    named |= dict(zip(options[::2], options[1::2], strict=True))
    words = [word for pair in named.items() for word in pair]
    ran = run_command(program("edgefl-agent"), *words, timeout=60)

    assert ran.returncode == code, ran.stderr
    assert text in ran.stderr
    assert ran.stdout == ""


def test_a_second_agent_on_one_store_is_refused(tmp_path: Path, data: Path) -> None:
    first = CppAgent.of("demo", NOBODY, data, tmp_path / "store")
    first.event("offline")
    second = CppAgent.of("demo", NOBODY, data, tmp_path / "store")

    assert second.ended() == 11
    assert second.process.stderr is not None
    assert f"process {first.process.pid}" in second.process.stderr.read()
    assert first.stop() == 0


@pytest.fixture
def deaf() -> Iterator[str]:
    """A port whose queue is full: connecting to it takes for ever."""
    with closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        waiting = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(address)
            waiting.append(client)
        yield f"{address[0]}:{address[1]}"
        for client in waiting:
            client.close()


def test_an_agent_ends_though_its_broker_is_silent(tmp_path: Path, data: Path, deaf: str) -> None:
    agent = CppAgent.of("demo", deaf, data, tmp_path / "store")
    while not (tmp_path / "store" / "device.key").exists():
        time.sleep(0.01)

    assert agent.stop() == 0


def threads_of(agent: CppAgent) -> int:
    return len(list(Path(f"/proc/{agent.process.pid}/task").iterdir()))


def test_an_agent_that_looks_around_leaves_off_when_it_is_told_to_end(start: StartAgent) -> None:
    """Looking around takes ten seconds of silence, and ends with a word about it."""
    agent = start("--limit", "notice_s=0.5")
    agent.event("online")
    serving = threads_of(agent)
    while threads_of(agent) <= serving:
        time.sleep(0.01)

    assert agent.stop() == 0
    assert "alone" not in agent.left()


def test_an_agent_without_a_disk_says_so_and_trains_once_there_is_room(
    server: ScriptedServer, start: StartAgent
) -> None:
    world = World(tiny.make_bundle())
    agent = start("--limit", "retry_pause_s=0.05", "--limit", "fetch_timeout_s=1")
    server.hello()
    everything = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
    server.open(world)
    told = agent.event("store", "failed")
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, everything)
    update = server.update()
    server.ack(update)
    accepted = agent.event("accepted")

    assert "cannot be written" in told["text"]
    assert update.nonce == "n1"
    assert accepted["details"]["round"] == 1
    assert agent.stop() == 0


def test_an_agent_that_waits_for_room_feeds_its_watchdog(
    server: ScriptedServer, start: StartAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        agent = start("--limit", "retry_pause_s=1000")
        server.hello()
        resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
        server.open(World(tiny.make_bundle()))
        agent.event("store")
        while not manager.recv(4096).startswith(b"STATUS=store"):
            pass

        assert [manager.recv(4096) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        assert agent.stop() == 0


def test_a_killed_agent_sends_what_it_had_computed(server: ScriptedServer, start: StartAgent) -> None:
    first = start()
    server.open(World(tiny.make_bundle()))
    computed = server.update()
    first.process.send_signal(signal.SIGKILL)
    assert first.ended() == -signal.SIGKILL
    second = start()
    again = server.update()
    server.ack(again)
    second.event("accepted")

    assert again == computed
    assert second.stop() == 0
