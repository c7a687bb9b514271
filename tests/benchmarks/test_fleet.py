"""Rows of the benchmarks fleet and coordinator, and what load refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec
import pytest

from benchmarks.coordinator import measure as measure_coordinator
from benchmarks.fleet.command import FleetCase, measure
from benchmarks.load.settings import BehaviourShares
from benchmarks.mirror import measure as mirror_measure
from benchmarks.round import measure as round_measure
from benchmarks.workers.mirror import Route
from tests import needs
from tests.conftest import BrokerProcess
from tests.support.errors import ConfigError, refuses

BENCHMARKS = [sys.executable, "-m", "benchmarks"]
LOAD = [*BENCHMARKS, "load", "--broker", "127.0.0.1:1"]


@pytest.mark.e2e
@pytest.mark.slow
def test_a_row_of_twenty_devices() -> None:
    needs.require("mosquitto")
    told: list[str] = []
    row = measure(
        FleetCase(20, selected=15, update="small", rounds=2, shares=BehaviourShares(duplicate=0.2)),
        told.append,
    )

    assert (row.devices, row.selected, row.rounds, row.closed) == (20, 15, 2, 2)
    assert sum(row.fates.values()) == 90 and set(row.fates) == {"honest: accepted", "duplicate: accepted"}
    assert 3000 < row.update_bytes < 4000
    assert (row.dropped_messages, row.resent_chunks, row.vanished, row.unanswered) == (0, 0, 0, 0)
    assert 0 < row.round_p50_s <= row.round_p99_s and 0 < row.ack_p50_s <= row.ack_p99_s
    assert min(row.connect_s, row.cycle_p50_s, row.updates_per_s, row.server_cpu_s, row.generator_cpu_s) > 0
    assert row.server_start_bytes > 0 and row.server_idle_bytes <= row.server_peak_bytes
    assert 0 < row.journal_bytes <= row.out_bytes
    assert any("round 6 of 6" in text for text in told)


def test_rows_of_the_coordinator() -> None:
    rows = measure_coordinator([20, 60], events=30)
    assert [(row.assignments, row.event, row.events) for row in rows] == [
        (count, event, number)
        for count, number in ((20, 19), (60, 30))
        for event in ("hello", "status", "tick", "answer", "wake")
    ]
    assert all(row.us_per_event > 0 and row.us_median > 0 for row in rows)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="dense, onebit, middle, small"):
        FleetCase(10, update="huge")
    with refuses(ConfigError, selected=11, devices=10):
        FleetCase(10, selected=11)


def test_too_few_open_files_are_named_with_the_remedy() -> None:
    command = ["bash", "-c", 'ulimit -n 300 && exec "$@"', "load", *LOAD, "--devices", "1000"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "1000 connections need 1128 open files, and this process may have 300" in ended.stderr
    assert "ulimit -Hn 1128" in ended.stderr


def test_load_says_that_nobody_answers() -> None:
    ended = subprocess.run(
        [*LOAD, "--devices", "2", "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 7 and "Connection refused" in ended.stderr and not ended.stdout


def test_load_tells_its_numbers_when_it_is_stopped(mosquitto: BrokerProcess) -> None:
    """Of a federation without a server: connected, and nothing else."""
    command = [
        *BENCHMARKS,
        "load",
        "--broker",
        str(mosquitto.address),
        "--federation",
        "nobody",
        "--devices",
        "5",
    ]
    terminal, stderr = os.openpty()  # progress is shown in a terminal only
    with subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=stderr, env=os.environ | {"TERM": "xterm"}
    ) as running:
        os.close(stderr)
        try:
            shown = b""
            while b"5 of 5 connected" not in shown:
                shown += os.read(terminal, 4096)
            running.send_signal(signal.SIGINT)
            said, _ = running.communicate(timeout=60)
        finally:
            running.kill()  # where SIGINT is ignored, as by a shell's background jobs, nothing else ends it
            os.close(terminal)
    assert running.returncode == 0
    summary = msgspec.json.decode(said)
    assert (summary["devices"], summary["connected"], summary["tasks"], summary["fates"]) == (5, 5, 0, {})


# -- the benchmark of a round's time, with real processes --------------------------------------------------


@pytest.mark.slow
def test_measure_times_rounds_of_devices_that_train_nothing() -> None:
    row = round_measure(devices=1, model="mlp", rounds=2, broker="amqtt")

    assert 0 < row.round_min_s <= row.round_s and row.up_bytes > 0


# -- the trial of a large model, with a small one ----------------------------------------------------------


NBYTES = (5 << 20) + 7


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["broker", "mirror"])
def test_a_model_arrives_whole_by_either_way(way: Route) -> None:
    needs.require("mosquitto")
    row = mirror_measure(way, NBYTES, 1 << 20)

    assert (row.way, row.bytes, row.units, row.page_bytes) == (way, NBYTES, 6, 0)
    assert (row.broker_bytes, row.mirror_bytes) == ((NBYTES, 0) if way == "broker" else (0, NBYTES))
    assert row.mirror_peak_bytes > 0 if way == "mirror" else row.mirror_peak_bytes == 0
    assert min(row.device_peak_bytes, row.server_peak_bytes, row.broker_peak_bytes) > 1 << 20
