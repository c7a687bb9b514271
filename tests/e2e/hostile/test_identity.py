"""A server, enrolled devices and a stranger as processes on a real broker; the server's key is rotated half-way."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edgefl.data.datasets import digits
from tests.conftest import BrokerProcess, on_other_broker
from tests.e2e.inside import lines
from tests.e2e.runs import EDGEFL, PATIENCE_S, TINY
from tests.support.commands import run_command

ROUNDS = 3


def command(*words: object) -> list[str]:
    return [*EDGEFL, *map(str, words)]


def said(*words: object) -> dict[str, Any]:
    ran = run_command(*command(*words, "--json"), check=True, timeout=PATIENCE_S)
    return dict(json.loads(ran.stdout))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def start(stack: ExitStack, *words: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(command(*words, "--json"), stdout=subprocess.PIPE, text=True)
    stack.callback(process.kill)
    return process


def until(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if (found := json.loads(line))["event"] == event:
            return dict(found)
    raise AssertionError(f"it ended without {event}")


@pytest.mark.slow
@on_other_broker
def test_devices_follow_a_new_server_key(stack: ExitStack, broker: BrokerProcess, tmp_path: Path) -> None:
    config, entries, key = tmp_path / "federation.toml", tmp_path / "list.sqlite", tmp_path / "server.key"
    named = TINY.replace('name = "e2e"', f'name = "e2e"\nrounds = {ROUNDS}')
    config.write_text(f"{named}\n[round]\nmin_devices = 2\n[tiers.strong]\ncount = 1\n")
    write_samples(tmp_path / "data.npz")
    at = (
        "--broker",
        broker.address,
        "--federation",
        "e2e",
        "--data",
        tmp_path / "data.npz",
        "--until-done",
    )
    token = said("enroll", "token", "strong-0", "--federation", "e2e", "--list", entries, "--sign-key", key)[
        "token"
    ]
    request = tmp_path / "strong-1.csr"
    said(
        "enroll",
        "request",
        "strong-1",
        "--federation",
        "e2e",
        "--store",
        tmp_path / "strong-1",
        "--out",
        request,
    )
    said("enroll", "add", request, "--list", entries)
    public = said("key", "show", key)["public_key"]

    def device(name: str, *more: object) -> subprocess.Popen[str]:
        return start(stack, "device", "--id", name, "--store", tmp_path / name, *at, *more)

    def server() -> subprocess.Popen[str]:
        served = ("--config", config, "--broker", broker.address, "--out", tmp_path / "out")
        return start(stack, "server", *served, "--sign-key", key, "--enrolled", entries)

    (tmp_path / "token").write_text(token)
    devices = [
        device("strong-0", "--token", f"@{tmp_path / 'token'}"),
        device("strong-1", "--server-key", public),
    ]
    stranger = device("strong-2", "--server-key", public)
    first = server()
    refused = until(first, "rejected")
    closed = until(first, "roundclosed")
    first.terminate()
    first.wait(PATIENCE_S)
    renewed = said("key", "rotate", key, "--overlap", 0)["public_key"]
    second = server()
    started = until(second, "started")
    told = until(stranger, "server-key")
    until(second, "finished")

    assert (refused["device"], refused["reason"]) == ("strong-2", "unknown-key")
    assert closed["reports"] == 2 and started["server_key"] == renewed and renewed in told["text"]
    for each in devices:
        events = [json.loads(line) for line in each.communicate(timeout=PATIENCE_S)[0].splitlines()]
        assert len(lines(events, "accepted")) == ROUNDS and lines(events, "server-key")
    stranger.kill()
    rows = json.loads(
        subprocess.run(
            command("enroll", "ls", "--list", entries, "--federation", "e2e", "--json"),
            capture_output=True,
            check=True,
        ).stdout
    )
    assert {row["device"]: row["source"] for row in rows} == {"strong-0": "token", "strong-1": "request"}


def write_samples(path: Path) -> None:
    from edgefl.data.dataset import write_client

    data = digits()
    write_client(path, data.train_x[:40], data.train_y[:40])
