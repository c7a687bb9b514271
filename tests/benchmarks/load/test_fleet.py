"""Generated devices against a real server and a real broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.load.command import LoadGenerator
from benchmarks.load.settings import BehaviourShares, LoadSettings
from benchmarks.load.updates import values_of
from edgefl.wire import tensors
from edgefl.wire.bundle.graphs import Port
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl_server.events import RoundClosed, UpdateAccepted
from edgefl_server.run_spec import RunSpec
from tests.conftest import BrokerProcess, Mosquitto
from tests.server.fleet import WEIGHTS, RunningServer, names_of, plan_for
from tests.support.errors import BrokerError, ConfigError, refuses

Serve = Callable[..., RunningServer]


def sending(plan: RunSpec, tier: str = "strong") -> RunSpec:
    """The plan with a manifest that tells the tensors of an update, as exported ones do."""
    made = plan.tiers[tier]
    ports = tuple(
        Port(name=f"update.{name}", role="update", dtype="float32", shape=WEIGHTS[name].shape)
        for name in names_of(tier)
    )
    graph = msgspec.structs.replace(made.bundle.manifest.graphs[0], outputs=ports)
    manifest = msgspec.structs.replace(made.bundle.manifest, graphs=(graph,))
    return replace(
        plan, tiers={**plan.tiers, tier: replace(made, bundle=replace(made.bundle, manifest=manifest))}
    )


@pytest.fixture
def serve(federation: str, limits: Limits, tmp_path: Path) -> Iterator[Serve]:
    servers: list[RunningServer] = []

    def start(broker: BrokerProcess, devices: int, **rules: Any) -> RunningServer:
        plan = sending(plan_for(federation, limits, min_devices=devices, **rules))
        servers.append(RunningServer.start(plan, broker.address, tmp_path / "out"))
        return servers[-1]

    yield start
    for server in servers:
        server.service.stop()


def fleet_of(
    federation: str,
    broker: BrokerProcess,
    limits: Limits,
    devices: int,
    say: Callable[[str], None] = print,
    **more: Any,
) -> LoadGenerator:
    load = LoadSettings(federation, devices, prefix="strong-", limits=limits, **more)
    return LoadGenerator(load, broker.address, say=say)


def test_two_rounds_close(mosquitto: BrokerProcess, federation: str, limits: Limits, serve: Serve) -> None:
    server = serve(mosquitto, 20)
    fleet = fleet_of(federation, mosquitto, msgspec.structs.replace(limits, ack_timeout_s=60.0), 20)
    summary = fleet.run(60.0)
    server.join()

    closed = server.seen_of(RoundClosed)
    assert [(event.outcome, event.reports, event.rejected) for event in closed] == [("closed", 20, 0)] * 2
    assert summary.fates == {"honest: accepted": 40}
    assert (summary.connected, summary.rounds, summary.tasks, summary.updates) == (20, 2, 40, 40)
    assert (summary.drops, summary.unanswered, summary.resent_share) == (0, 0, 0.0)
    assert summary.update_bytes > limits.chunk_bytes, "several chunks each"
    digests = {event.sha256 for event in server.seen if isinstance(event, UpdateAccepted)}
    assert len(digests) == 40, "each update is its device's own"


def test_the_servers_mean_is_what_was_sent(
    mosquitto: BrokerProcess, federation: str, limits: Limits, serve: Serve, tmp_path: Path
) -> None:
    server = serve(mosquitto, 3, rounds=1)
    fleet = fleet_of(federation, mosquitto, limits, 3)
    fleet.run(60.0)
    server.join()
    [manifest] = fleet.state.manifests
    sent = tensors.load(values_of(manifest, seed=0))
    model = tensors.load((tmp_path / "out" / "model.safetensors").read_bytes())
    for name, array in sent.items():
        np.testing.assert_allclose(model[name], array, atol=1e-7)


def test_only_those_that_are_selected_get_a_task(
    mosquitto: BrokerProcess, federation: str, limits: Limits, serve: Serve
) -> None:
    server = serve(mosquitto, 10, fraction=0.3)
    summary = fleet_of(federation, mosquitto, limits, 10).run(60.0)
    server.join()
    assert (summary.connected, summary.tasks) == (10, 6)
    assert summary.fates == {"honest: accepted": 6}


def test_devices_may_fetch_train_and_tell_how_far_they_are(
    mosquitto: BrokerProcess, federation: str, limits: Limits, serve: Serve
) -> None:
    server = serve(mosquitto, 3)
    fleet = fleet_of(federation, mosquitto, limits, 3, fetch=True, train_s=0.3, progress_s=5.0)
    summary = fleet.run(60.0)
    server.join()
    weights = sum(array.nbytes for array in WEIGHTS.values())
    assert summary.fates == {"honest: accepted": 6}
    assert summary.received_bytes > 3 * weights, "each fetched the model"
    assert any(
        event.__class__.__name__ == "DeviceSeen" and event.stage == "train"
        for event in server.seen_of(object)
    )


def test_bad_behaviours_fail(mosquitto: BrokerProcess, federation: str, limits: Limits, serve: Serve) -> None:
    server = serve(mosquitto, 24, deadline_s=2.0, offline_grace_s=1.0)
    shares = BehaviourShares(vanish=0.2, late=0.2, duplicate=0.2, garbage=0.2)
    told: list[str] = []
    fleet = fleet_of(federation, mosquitto, limits, 24, told.append, shares=shares, away_s=0.3, late_s=2.5)
    summary = fleet.run(60.0)
    server.join()
    drawn = [{name: shares.behaviour("0", name, number) for name in fleet.load.names} for number in (1, 2)]
    count = {
        behaviour: [list(each.values()).count(behaviour) for each in drawn]
        for behaviour in (*drawn[0].values(),)
    }

    assert len(server.seen_of(RoundClosed)) == 2
    assert summary.vanished > 0 and summary.connected > 0
    assert summary.fates["garbage: rejected (malformed)"] >= count["garbage"][0]
    assert summary.fates["duplicate: accepted"] >= count["duplicate"][0]
    assert summary.fates["late: rejected (closed-round)"] >= 1
    assert not {name for name in summary.fates if name.startswith("garbage: accepted")}
    assert sum(summary.fates.values()) + summary.unanswered == summary.updates
    assert any("malformed" in text for text in told)


def test_devices_come_back(own_mosquitto: Mosquitto, federation: str, limits: Limits, serve: Serve) -> None:
    def disturb(said: str) -> None:
        if said == "round 2 is open":
            own_mosquitto.kill()
            own_mosquitto.start()

    server = serve(own_mosquitto, 8, rounds=3)
    summary = fleet_of(federation, own_mosquitto, limits, 8, disturb, train_s=0.2).run(90.0)
    server.join()
    assert [event.reports for event in server.seen_of(RoundClosed)] == [8, 8, 8]
    assert summary.drops >= 8 and summary.connected == 8


def test_a_broker_that_is_not_there_is_named(federation: str, limits: Limits) -> None:
    load = LoadSettings(federation, 3, limits=limits)
    with pytest.raises(BrokerError, match=r"127\.0\.0\.1:1: Connection refused"):
        LoadGenerator(load, Address("127.0.0.1", 1)).run(30.0)


def test_a_broker_that_lets_nobody_in_is_named(tmp_path: Path, federation: str, limits: Limits) -> None:
    broker = Mosquitto(tmp_path, allow_anonymous=False)
    broker.start()
    try:
        with pytest.raises(BrokerError, match="not authorized"):
            LoadGenerator(LoadSettings(federation, 3, limits=limits), broker.address).run(30.0)
    finally:
        broker.stop()


def test_ways_that_the_generator_does_not_speak_are_refused(federation: str) -> None:
    with pytest.raises(BrokerError, match="plain TCP only"):
        LoadGenerator(LoadSettings(federation, 1), Address.parse("mqtts://localhost"))
    with pytest.raises(BrokerError, match="cannot be found"):
        LoadGenerator(LoadSettings(federation, 1), Address("no.such.host.invalid"))


def test_a_format_that_is_not_offered_is_refused(
    mosquitto: BrokerProcess, federation: str, limits: Limits, serve: Serve
) -> None:
    serve(mosquitto, 2)
    with refuses(ConfigError, tier="strong", format="executorch"):
        fleet_of(federation, mosquitto, limits, 2, format="executorch").run(60.0)
