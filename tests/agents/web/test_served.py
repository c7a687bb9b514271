"""What the page's server answers to browsers: files, the offer, samples, the code, and a way to the broker."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import ConfigError
from edgefl.web.page import as_svg, in_terminal
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import Connected, IncomingMessage
from edgefl.wire.mqtt.session import Session
from edgefl_server.access.certificates import LabAuthority
from tests.agents.web.served import CODE, SECRET, WASM, WebProcess
from tests.conftest import Mosquitto

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, mosquitto: Mosquitto) -> Iterator[WebProcess]:
    more = {"relay": mosquitto.address.url, "server_key": "ab" * 32}
    with WebProcess(tmp_path_factory.mktemp("web"), more=more) as served:
        yield served


def test_a_page_is_isolated_and_loads_nothing_from_elsewhere(page: WebProcess) -> None:
    for path in ("/", "/worker.js", "/ort/ort-wasm-simd-threaded.wasm", "/api/offer", "/nothing"):
        headers = page.get(path).headers
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-embedder-policy"] == "require-corp"
        policy = headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy and "unsafe-inline" not in policy and "'unsafe-eval'" not in policy
        )
        assert f"connect-src 'self' ws://127.0.0.1:{page.port};" in policy
    assert page.get("/").body.startswith(b"<!doctype html>")
    assert page.get("/nothing").status == 404
    assert page.get("/../federation.toml").status == 404


def test_what_is_large_lies_packed_and_travels_so(page: WebProcess) -> None:
    answer = page.get(f"/{WASM}", **{"Accept-Encoding": "gzip"})
    told = answer.headers["content-encoding"], answer.headers["content-type"]
    assert (answer.status, *told) == (200, "gzip", "application/wasm")
    assert gzip.decompress(answer.body) == CODE and len(answer.body) < len(CODE)
    assert "content-encoding" not in page.get("/worker.js").headers
    again = page.get(f"/{WASM}", **{"If-None-Match": answer.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


def test_a_host_that_would_change_the_policy_is_left_out(page: WebProcess) -> None:
    policy = page.get("/", Host="evil; script-src *").headers["content-security-policy"]
    assert "evil" not in policy and "connect-src 'self';" in policy


@pytest.mark.parametrize("path", ["/api/offer", "/api/sample.npz?device=a", "/api/code.svg"])
def test_nothing_but_files_is_for_who_has_no_secret(page: WebProcess, path: str) -> None:
    for given in ("", "wrong", SECRET[:-1], SECRET + "x"):
        answer = page.get(f"{path}{'&' if '?' in path else '?'}join={given}")
        assert answer.status == 403 and b"scan the code" in answer.body
    assert page.asked(path).status == 200


def test_the_offer_says_what_is_trained(page: WebProcess) -> None:
    offer = page.asked("/api/offer").json

    assert (offer["federation"], offer["model"], offer["broker"]) == ("garden", "mlp", "")
    assert offer["server_keys"] == ["ab" * 32]
    assert [(tier["name"], tier["prefix"]) for tier in offer["tiers"]] == [
        ("strong", "strong-web-"),
        ("weak", "weak-web-"),
    ]
    assert offer["samples"] > 50 and offer["photos"] is True


def test_a_device_gets_the_same_rows_whenever_it_asks(page: WebProcess) -> None:
    def rows(device: str) -> dict[str, np.ndarray]:
        return dict(np.load(io.BytesIO(page.asked(f"/api/sample.npz?device={device}").body)))

    first, again = rows("weak-web-000001"), rows("weak-web-000001")
    assert len(first["y"]) == page.asked("/api/offer").json["samples"]
    assert all(np.array_equal(first[name], again[name]) for name in first)
    others = [rows(f"weak-web-{number:06x}")["x"] for number in range(2, 8)]
    assert any(not np.array_equal(first["x"], other) for other in others)
    assert page.asked("/api/sample.npz?device=").status == 404


def test_the_code_holds_the_address(page: WebProcess) -> None:
    url = f"{page.url}/#{SECRET}"
    answer = page.asked("/api/code.svg")
    assert answer.body == as_svg(url) and answer.headers["content-type"] == "image/svg+xml"
    lines = in_terminal(url).splitlines()
    assert len({len(line) for line in lines}) == 1, "a code is a square"
    assert in_terminal(url) != in_terminal(url + "x")


# -- the way to the broker ---------------------------------------------------------------------------------------


def through(page: WebProcess, secret: str = SECRET) -> Address:
    return Address("127.0.0.1", page.port, path=f"/mqtt?join={secret}")


def heard(session: Session) -> tuple[str, bytes]:
    while not isinstance(event := session.inbox.get(timeout=PATIENCE_S), IncomingMessage):
        pass
    return event.topic, event.payload


def test_messages_go_both_ways_whole(
    page: WebProcess, mosquitto: Mosquitto, connect: Callable[..., Session], federation: str
) -> None:
    server, browser = connect(mosquitto.address), connect(through(page))
    chunks = {f"{federation}/blobs/{number}": os.urandom(128 << 10) for number in range(8)}
    for topic, data in chunks.items():
        server.publish(topic, data, retain=True).wait(PATIENCE_S)
    browser.subscribe(chunks)
    assert dict(heard(browser) for _ in chunks) == chunks
    server.subscribe([f"{federation}/updates"])
    update = os.urandom(256 << 10)
    browser.publish(f"{federation}/updates", update)
    assert heard(server) == (f"{federation}/updates", update)


def test_the_broker_needs_the_secret(page: WebProcess, connect: Callable[..., Session]) -> None:
    stranger, friend = connect(through(page, "wrong")), connect(through(page))
    while not isinstance(friend.inbox.get(timeout=PATIENCE_S), Connected):
        pass
    assert not stranger.connected


def test_a_browser_comes_back_after_its_broker_did(
    tmp_path: Path, own_mosquitto: Mosquitto, connect: Callable[..., Session]
) -> None:
    with WebProcess(tmp_path, more={"relay": own_mosquitto.address.url}) as page:
        browser = connect(through(page))
        while not isinstance(browser.inbox.get(timeout=PATIENCE_S), Connected):
            pass
        own_mosquitto.kill()
        own_mosquitto.start()
        while not isinstance(browser.inbox.get(timeout=PATIENCE_S), Connected):
            pass


def test_a_page_over_https_is_for_its_certificate(tmp_path: Path) -> None:
    authority = LabAuthority(tmp_path / "ca")
    pair = authority.broker("127.0.0.1")
    more = {"cert_file": str(pair.certificate), "key_file": str(pair.key)}
    with WebProcess(tmp_path, more=more, authority=str(authority.own.certificate)) as page:
        assert (
            f"connect-src 'self' wss://127.0.0.1:{page.port};"
            in page.get("/").headers["content-security-policy"]
        )


def test_a_federation_whose_data_are_elsewhere_offers_no_sample(tmp_path: Path) -> None:
    lacking = '[federation]\nname = "far"\n[data]\nname = "file"\nfile = "nowhere.npz"\n'
    with WebProcess(tmp_path, federation=lacking) as page:
        offer = page.asked("/api/offer").json
        assert (offer["samples"], offer["photos"]) == (0, False)
        assert page.asked("/api/sample.npz?device=a").status == 404


def test_a_relay_refuses_brokers_that_no_browser_reaches_through_it() -> None:
    from edgefl.web.relay import BrowserRelay

    with pytest.raises(ConfigError, match="asks for client certificates"):
        BrowserRelay(Address("broker.lan", cert_file="a", key_file="b"))
    with pytest.raises(ConfigError, match="reached by WebSocket already"):
        BrowserRelay(Address("broker.lan", path="/mqtt"))
