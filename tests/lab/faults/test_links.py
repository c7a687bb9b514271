"""Links that are bad on purpose, with an echo at their other end."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.faults import random_schedule
from edgefl.lab.faults.links import LinkRelays, PacketSplitter, second_copy
from edgefl.lab.faults.schedule import KINDS, Fault, Schedule, check_targets, load_schedule
from tests.support.errors import ConfigError, refuses

PUBLISH = b"\x32\x07\x00\x03a/b\x00\x01"
WAIT_S = 300.0


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(4096):
            self.request.sendall(data)
        self.server.gone.set()  # type: ignore[attr-defined]


@pytest.fixture
def echo() -> Iterator[socketserver.ThreadingTCPServer]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        server.gone = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def links(echo: socketserver.ThreadingTCPServer) -> Iterator[LinkRelays]:
    made = LinkRelays(("one", "other"), ("127.0.0.1", echo.server_address[1]), seed=1)
    yield made
    made.stop()


def connected(links: LinkRelays, name: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", links.ports[name]), timeout=WAIT_S)
    assert answered(client) == PUBLISH
    return client


def answered(client: socket.socket, size: int = len(PUBLISH)) -> bytes:
    client.sendall(PUBLISH)
    found = b""
    while len(found) < size:
        found += client.recv(size - len(found))
    return found


def test_a_delay_holds_packets_back_and_ends(links: LinkRelays) -> None:
    fault = Fault(kind="delay", amount=0.2)
    with connected(links, "one") as client, connected(links, "other") as other:
        links.begin(["one"], fault)
        began = time.monotonic()
        assert answered(other) == PUBLISH
        assert answered(client) == PUBLISH
        assert time.monotonic() - began >= 0.4, "both ways"
        links.end(["one"], fault)
        assert answered(client) == PUBLISH


def test_a_stalled_link_lets_nothing_through_until_it_ends(links: LinkRelays) -> None:
    fault = Fault(kind="stall")
    with connected(links, "one") as client:
        links.begin(["one"], fault)
        client.sendall(PUBLISH)
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        links.end(["one"], fault)
        client.settimeout(WAIT_S)
        assert client.recv(len(PUBLISH)) == PUBLISH


def test_a_reset_cuts_the_connections_of_its_link_only(links: LinkRelays) -> None:
    with connected(links, "one") as client, connected(links, "other") as other:
        links.begin(["one"], Fault(kind="reset"))
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert answered(other) == PUBLISH
    with connected(links, "one"):
        pass


def test_a_half_open_connection_stays_open(links: LinkRelays, echo: socketserver.ThreadingTCPServer) -> None:
    fault = Fault(kind="half_open")
    with connected(links, "one") as client:
        links.begin(["one"], fault)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert not echo.gone.wait(0.2)  # type: ignore[attr-defined]
        with connected(links, "one"):
            pass
        links.end(["one"], fault)
        assert echo.gone.wait(WAIT_S)  # type: ignore[attr-defined]


def test_a_publish_comes_twice_and_says_that_it_is_a_copy(links: LinkRelays) -> None:
    with connected(links, "one") as client:
        links.begin(["one"], Fault(kind="duplicate", amount=1.0))
        copy = b"\x3a" + PUBLISH[1:]
        found = answered(client, 4 * len(PUBLISH))

    assert found == PUBLISH + copy + copy + copy, "each way doubles what comes"


# -- MQTT packets out of a stream that comes in pieces of any size -----------------------------------------


CONNECT, PACKETS_PUBLISH, BIG = b"\x10\x02ab", b"\x32\x07\x00\x03a/b\x00\x01", b"\x30\x80\x02" + bytes(256)


@given(st.lists(st.sampled_from([CONNECT, PACKETS_PUBLISH, BIG]), max_size=6), st.integers(1, 40))
def test_packets_are_found_however_they_are_cut(packets: list[bytes], size: int) -> None:
    stream, cutter = b"".join(packets), PacketSplitter()
    found = [packet for at in range(0, len(stream), size) for packet in cutter.feed(stream[at : at + size])]

    assert found == packets


@given(st.binary(max_size=100), st.integers(1, 7))
def test_no_byte_of_any_stream_is_lost_or_added(stream: bytes, size: int) -> None:
    cutter = PacketSplitter()
    found = b"".join(
        packet for at in range(0, len(stream), size) for packet in cutter.feed(stream[at : at + size])
    )

    assert stream.startswith(found)


def test_a_second_copy_is_a_publish_that_says_so() -> None:
    assert second_copy(CONNECT) is None
    assert second_copy(PACKETS_PUBLISH) == b"\x3a" + PACKETS_PUBLISH[1:]
    assert second_copy(b"\x30\x05\x00\x03a/b") == b"\x30\x05\x00\x03a/b"


# -- faults as data ----------------------------------------------------------------------------------------


DEVICES = ("a-0", "a-1")


def test_a_seed_draws_the_same_faults_and_many_seeds_draw_every_kind() -> None:
    drawn = [random_schedule(seed, DEVICES, 3) for seed in range(100)]

    assert drawn == [random_schedule(seed, DEVICES, 3) for seed in range(100)]
    assert {fault.kind for schedule in drawn for fault in schedule.faults} == set(KINDS)
    for schedule in drawn:
        check_targets(schedule, DEVICES, broker=True)


def test_a_row_of_the_campaign_is_a_file_that_gives_the_faults_back(tmp_path: Path) -> None:
    schedule = random_schedule(7, DEVICES, 3)
    path = tmp_path / "faults.json"
    path.write_bytes(msgspec.json.encode(schedule))

    assert load_schedule(path) == schedule


def test_a_schedule_is_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text('seed = 3\n[[faults]]\nkind = "delay"\ntarget = "a-0"\nround = 2\namount = 0.2\n')

    assert load_schedule(path) == Schedule(
        seed=3, faults=(Fault(kind="delay", target="a-0", round=2, amount=0.2),)
    )


@pytest.mark.parametrize(
    "text", ["seed = ", '[[faults]]\nkind = "rain"', '[[faults]]\nkind = "kill"\nround = 0', "[[fault]]\n"]
)
def test_a_file_that_is_no_schedule_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"faults\.toml cannot be used"):
        load_schedule(path)


@pytest.mark.parametrize(
    ("fault", "broker"),
    [
        (Fault(kind="kill", target="a-9"), True),
        (Fault(kind="delay", target="broker"), True),
        (Fault(kind="kill", target="broker"), False),
    ],
)
def test_a_fault_of_what_is_not_there_is_refused(fault: Fault, broker: bool) -> None:
    with refuses(ConfigError, target=fault.target):
        check_targets(Schedule(faults=(fault,)), DEVICES, broker=broker)
