"""What the kit is played with: its view of packets, its line to the broker, its bundles."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from edgefl.errors import BrokerError
from edgefl.wire import bits
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import Will
from edgefl.wire.mqtt.session import Session
from edgefl_conformance.material.bundles import FORMATS, drawn, material, names, samples, unit_bytes
from edgefl_conformance.play import broker
from edgefl_conformance.play.packets import Connect, Disconnect, PacketReader, Subscribe
from edgefl_conformance.play.relay import PacketRelay
from tests.conftest import BrokerProcess
from tests.wire.mqtt.events import wait_until

CONNECT = bytes.fromhex("10 17 0004 4d515454 04 2c 0014 0002 6964 0001 74 0004 00ff0102".replace(" ", ""))
SUBSCRIBE = bytes.fromhex("82 08 0001 0003 612f62 01".replace(" ", ""))


def test_packets_are_read_however_they_are_cut() -> None:
    whole = CONNECT + SUBSCRIBE + bytes.fromhex("e000")
    reader = PacketReader()
    found = [packet for byte in whole for packet in reader.feed(bytes([byte]))]

    will = Connect(
        "id", clean=False, keepalive_s=20, version=4, will_topic="t", will_payload=b"\x00\xff\x01\x02"
    )
    assert found == [
        Connect(**{**vars(will), "will_qos": 1, "will_retained": True}),
        Subscribe("a/b", 1),
        Disconnect(),
    ]
    assert PacketReader().feed(whole) == found


@pytest.mark.e2e
@pytest.mark.parametrize("version", ["3.1.1", pytest.param("5", marks=pytest.mark.needs("mosquitto"))])
def test_a_session_is_read_cut_and_comes_again(mosquitto: BrokerProcess, version: str) -> None:
    relay = PacketRelay(mosquitto.address.port)
    session = Session(
        Address("127.0.0.1", relay.port, mqtt=version),  # type: ignore[arg-type]
        "kit-test",
        limits=Limits(),
        will=Will("kit/will", b"gone"),
    )
    session.subscribe(["kit/one", "kit/two"])
    session.start()
    wait_until(lambda: session.settled, "subscriptions")
    connect, *rest = relay.packets()
    relay.cut()
    wait_until(lambda: sum(isinstance(each, Connect) for each in relay.packets()) == 2, "second connection")
    session.stop()
    wait_until(lambda: Disconnect() in relay.packets(), "DISCONNECT")
    relay.close()

    assert isinstance(connect, Connect)
    assert (connect.client_id, connect.will_topic, connect.will_payload) == ("kit-test", "kit/will", b"gone")
    assert (connect.will_qos, connect.will_retained, connect.clean) == (1, True, False)
    assert rest[:2] == [Subscribe("kit/one", 1), Subscribe("kit/two", 1)]


def test_a_relay_that_is_closed_listens_no_more() -> None:
    relay = PacketRelay(1)
    with socket.create_connection(("127.0.0.1", relay.port), timeout=300.0) as first:
        assert first.recv(1) == b""  # there is no broker, and the relay is back at its door
    time.sleep(0.1)
    relay.close()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", relay.port), timeout=300.0)


def test_a_broker_that_does_not_start_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = tmp_path / "deaf"
    deaf.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(broker, "_START_S", 1.0)
    monkeypatch.setattr(broker, "mosquitto_command", lambda *_, **__: [str(deaf)])

    with pytest.raises(BrokerError, match="did not start"), broker.running_broker(tmp_path):
        pass
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_the_bundles_are_there_in_both_formats_and_small() -> None:
    folder = Path(sys.modules["edgefl_conformance.material.bundles"].__file__ or "").parents[1] / "data"

    assert len(names()) == 12
    for format in FORMATS:
        assert {material(name, format).manifest.format for name in names()} == {format}
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 1 << 20


def test_weights_and_data_are_functions_of_names() -> None:
    x, y = samples()
    weight = drawn("head.dense.bias", (3,))

    assert (x.shape, x.dtype, y.dtype) == ((21, 1, 4, 4), np.uint8, np.int64)
    assert set(y.tolist()) == {0, 1, 2}
    assert weight.dtype == np.float32 and float(np.abs(weight).max()) <= 0.25
    assert float(drawn("v/head", (50,)).min()) >= 0.0


def test_a_mask_travels_as_gaps() -> None:
    what = material("masked", "onnx")
    (part,) = what.units.values()

    assert bits.unpack(part["submodel.mask"], 335).sum() == len(part["submodel.values"])
    assert b"submodel.mask~gaps:335" in unit_bytes(part)


def test_vectors_need_no_torch() -> None:
    script = (
        "import sys, edgefl_conformance.vectors.write, edgefl_conformance.campaign\n"
        "print(sorted({'torch', 'onnx', 'executorch'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert ran.stdout.strip() == "[]", ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", FORMATS)
def test_compiled_anew_a_bundle_has_the_same_ports_and_steps(target: str) -> None:
    from edgefl_conformance.material.make import made

    for name in names():
        wanted, found = material(name, target).manifest, made(name, target).manifest
        assert found.phases == wanted.phases and found.data == wanted.data and found.hyper == wanted.hyper
        for graph, other in zip(wanted.graphs, found.graphs, strict=True):
            assert (graph.name, graph.inputs, graph.outputs) == (other.name, other.inputs, other.outputs), (
                name
            )
