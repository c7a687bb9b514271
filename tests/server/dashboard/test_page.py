"""What the page answers to algorithms: tables, headers, orders; and to those who mean harm."""

from __future__ import annotations

import csv
import http.client
import io
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import SplitResult, quote, urlsplit

import pytest

from edgefl_server.dashboard.web.hub import MOST_STREAMS
from edgefl_server.operations import Mailbox, Pause, RollBack
from tests.server.dashboard.conftest import HOSTILE, MARKUP
from tests.server.dashboard.served import PageProcess


def table(page: PageProcess, path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(page.get(path).text)))


@pytest.mark.parametrize("name", ["run", "rounds", "devices", "tiers", "log", "vitals"])
def test_every_table_is_there_as_csv_and_json(name: str, page: PageProcess) -> None:
    rows, lines = page.get(f"/api/{name}.json").json, table(page, f"/api/{name}.csv")

    assert len(rows) == len(lines) > 0
    assert list(rows[0]) == list(lines[0])


def test_a_device_and_a_round_have_tables_of_their_own(page: PageProcess) -> None:
    mine = page.get("/api/devices/weak-0002/rounds.json").json
    of_round = page.get("/api/rounds/2.json").json

    assert [row["round"] for row in mine] == [1, 2, 3] and len(of_round) == 60
    assert table(page, "/api/devices/weak-0002/log.csv")[0]["text"] == "is there, as tier weak"
    assert {row["status"] for row in table(page, "/api/rounds/2.csv")} <= {"accepted", "declined", "missing"}


def test_devices_are_found_by_name_tier_and_state(page: PageProcess) -> None:
    def found(query: str) -> int:
        return len(page.get(f"/api/devices.json?{query}").json)

    assert (found("q=weak-000"), found("tier=strong"), found("state=idle")) == (3, 20, 61)
    assert (found("state=offline"), found("q=WEAK-0002&tier=strong"), found("q=%00")) == (0, 0, 0)
    assert "61 of 61 devices, page 2 of 2" in page.get("/?page=2").text
    assert "page 2 of 2" in page.get("/?page=999999999999").text or page.get("/?page=99").status == 200


def test_what_devices_say_is_no_markup(page: PageProcess) -> None:
    for path in ("/", f"/devices/{quote(HOSTILE, safe='')}"):
        answer = page.get(path)
        assert answer.status == 200
        assert "<img" not in answer.text and "&lt;img src=x onerror=alert(1)&gt;" in answer.text


def test_what_devices_say_is_no_formula(page: PageProcess) -> None:
    names = [row["device"] for row in table(page, "/api/devices.csv")]
    texts = [row["text"] for row in table(page, "/api/log.csv")]

    assert f"'{HOSTILE}" in names and HOSTILE not in names
    assert "'\t+1+1" in texts and MARKUP in texts


def test_pages_load_nothing_and_run_no_script_of_their_text(page: PageProcess) -> None:
    answer = page.get("/")

    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "http:" not in answer.text and "https:" not in answer.text and "style=" not in answer.text
    assert page.get("/static/../app.py").status == 404


def test_a_name_that_leads_here_from_elsewhere_gets_nothing(page: PageProcess) -> None:
    assert page.get("/api/run.json", Host="evil.example").status == 421
    assert page.get("/api/run.json", Host="localhost:1").status == 200


HOSTILE_PARTS = ("9" * 5000, "-1", "1e9", "%D9%A3", "%00", "..%2F..%2Fetc", "%C0%AE", "a" * 5000)


def test_what_is_not_there_is_told(page: PageProcess) -> None:
    for path in (
        "/nothing",
        "/devices/nobody",
        "/rounds/99",
        "/api/nothing.csv",
        "/api/rounds/1.xml",
        "/api/rounds/99.csv",
        *(f"{at}{number}" for at in ("/rounds/", "/devices/") for number in HOSTILE_PARTS),
        *(f"/api/rounds/{number}.csv" for number in HOSTILE_PARTS),
        *(f"/static/{name}" for name in HOSTILE_PARTS),
    ):
        assert page.get(path).status == 404, path
    assert (
        "There is no device" in page.get("/devices/%3Cb%3E").text
        and "<b>" not in page.get("/devices/%3Cb%3E").text
    )


def test_so_many_pages_are_kept_new_and_no_more(page: PageProcess) -> None:
    at = urlsplit(page.url)
    connections = [
        http.client.HTTPConnection(at.hostname or "", at.port, timeout=300) for _ in range(MOST_STREAMS)
    ]
    for connection in connections:
        connection.request("GET", "/live")
        assert connection.getresponse().status == 200
    assert page.get("/live").status == page.get("/feed").status == 503
    assert "too many pages are open" in page.get("/live").text and page.get("/").status == 200

    for connection in connections:
        connection.close()
    assert _told_of_news(at)  # once the page has seen that they are gone


def _told_of_news(at: SplitResult) -> bool:
    for _ in range(300):
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=300)
        with closing(connection):
            connection.request("GET", "/live")
            if connection.getresponse().status == 200:
                return True
        time.sleep(0.1)
    return False


def test_health_and_readiness(page: PageProcess) -> None:
    assert page.get("/healthz").text == "ok\n"
    assert (page.get("/readyz").status, page.get("/readyz").text) == (200, "ready\n")


def test_orders_need_the_token(page: PageProcess, folder: Path) -> None:
    box = Mailbox(folder)
    wrong = [
        page.order({"order": "pause"}, token="wrong"),
        page.order({"order": "pause"}, token=""),
        page.ask("POST", "/api/orders", {"Content-Type": "application/json"}, b'{"order":"pause"}'),
        page.order({"order": "pause"}, Authorization="Basic abc"),
    ]
    assert [answer.status for answer in wrong] == [401] * 4
    assert page.order({"order": "pause"}, **{"Content-Type": "text/plain"}).status == 415
    assert page.ask("GET", "/api/orders", {}).status == 405
    assert [page.order(bad).status for bad in ({"order": "sing"}, {"order": "rollback"}, [], "x" * 5000)] == [
        400
    ] * 4
    assert list(box.waiting()) == []

    assert page.order({"order": "pause"}).status == 202
    assert page.order({"order": "rollback", "version": 2, "by": "somebody else"}).status == 202

    (_, first), (_, second) = box.waiting()
    assert isinstance(first, Pause) and isinstance(second, RollBack)
    assert (first.by, second.by, second.version) == ("127.0.0.1", "127.0.0.1", 2)
    for path, _ in box.waiting():
        box.remove(path)


def test_a_page_without_a_token_is_read_only(folder: Path) -> None:
    with PageProcess.of(folder) as page:
        assert page.order({"order": "pause"}).status == 403
        assert "operator" not in page.get("/").text
    assert list(Mailbox(folder).waiting()) == []


def test_a_page_may_follow_another(page: PageProcess, folder: Path) -> None:
    with PageProcess(["--server", page.url]) as second:
        for path in (
            "/api/rounds.json",
            "/api/devices.json",
            "/api/tiers.json",
            "/api/devices/weak-0002/rounds.json",
        ):
            assert second.get(path).json == page.get(path).json
        refused = second.order({"order": "drain"}, token="not-the-token-at-all")
        assert refused.status == 502 and "missing or wrong" in refused.json["text"]
        assert second.order({"order": "drain"}).status == 202
    ((path_, order),) = Mailbox(folder).waiting()
    assert order is not None and order.name == "drain"
    Mailbox(folder).remove(path_)
