"""A server that strangers and dishonest devices flood: nothing is stored for them, and the round goes on."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.envelope import peek, unsigned
from edgefl.wire.mqtt.events import Connected, IncomingMessage
from edgefl.wire.mqtt.messages import Ack, Hello, Message, Status, Task, UpdateChunk, encode
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.coordinator import roster
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import OpenRound, Tick
from edgefl_server.events import DeviceLost, DeviceSeen, Event, Rejected, RoundClosed, Warned
from edgefl_server.publish.announcements import Announcements
from edgefl_server.service import Service
from tests.server.fleet import PATIENCE_S, MakeDevice, chunks_of, plan_for, progress, trained, update_for
from tests.support.listeners import CallingListener
from tests.wire.mqtt.speakers import speaker_in

NOBODY = Address("127.0.0.1", 1)
PROGRESS = progress("train")


class Flooded:
    """A service without a broker, which is given messages by hand."""

    def __init__(self, federation: str, limits: Limits, out: Path, **rules: Any) -> None:
        self.now = 1000.0
        self.events: list[Event] = []
        plan = plan_for(federation, limits, **rules)
        self.service = Service(
            plan, NOBODY, out, listener=CallingListener(self.events.append), clock=lambda: self.now
        )
        self.service.handle(Connected(resumed=False))
        self.topics = Topics(federation)
        self.path = out / "journal.sqlite"

    def hear(self, name: str, leaf: str, message: Message | bytes) -> None:
        payload = message if isinstance(message, bytes) else encode(message)
        self.service._inbox.put(IncomingMessage(f"{self.topics.root}/devices/{name}/{leaf}", payload))

    def work(self) -> None:
        while not self.service._inbox.empty() or self.service._receiver.has_batch:
            self.service.step()
        self.service.driver.write_devices(quiet=True)

    def rows(self, table: str) -> int:
        with sqlite3.connect(self.path) as journal:
            return int(journal.execute(f"select count(*) from {table}").fetchone()[0])

    def seen(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def round(self) -> OpenRound:
        """The round that is open."""
        assert self.service.state.round is not None
        return self.service.state.round


@pytest.fixture
def flooded(federation: str, limits: Limits, tmp_path: Path) -> Callable[..., Flooded]:
    return lambda **rules: Flooded(federation, limits, tmp_path, **rules)


def hello(**changes: Any) -> Hello:
    fields = {"agent": "a", "memory_bytes": 1 << 30, "cores": 1, "samples": 10, "engines": {}, **changes}
    return Hello(**fields)


def commits_of(service: Service) -> list[int]:
    counted: list[int] = []
    sa.event.listen(service._journal._engine, "commit", lambda _: counted.append(1))
    return counted


def test_strangers_leave_no_rows_and_cost_no_writes(flooded: Any) -> None:
    server = flooded()
    written = commits_of(server.service)
    chunk = UpdateChunk(nonce="n" * 24, sha256="0" * 64, index=0, count=1, size=1, data=b"x")
    for number in range(1000):
        server.hear(f"strong-{number}", "updates/1/0", chunk)
        server.hear(f"strong-{number}", "status", Status(online=bool(number % 2)))
        server.hear(f"strong-{number}", "progress", b"\x00")
    server.work()
    assert (server.rows("updates"), server.rows("devices")) == (0, 0)
    assert not server.service.state.devices and not written
    assert len(server.seen(Rejected)) <= 100
    server.now += 60.0
    assert server.service.refused["unknown names"] > 1000


def test_many_hellos_at_once_are_written_together(flooded: Any) -> None:
    server = flooded(min_devices=2000)
    written = commits_of(server.service)
    for number in range(500):
        server.hear(f"strong-{number}", "hello", hello())
    server.work()
    assert server.rows("devices") == 500 and len(written) < 50


def test_a_device_that_fits_no_tier_has_no_row(flooded: Any) -> None:
    server = flooded(tiers=(TierRule("strong", (), 1 << 40), TierRule("weak", (), 1 << 40)))
    server.hear("nobody", "hello", hello())
    server.work()
    assert server.rows("devices") == 0


def test_a_deadline_passes_under_a_flood(flooded: Any) -> None:
    server = flooded(min_devices=2, rounds=1, deadline_s=10.0)
    for name in ("strong-0", "strong-1"):
        server.hear(name, "hello", hello())
    server.work()
    server.service.dispatch(Tick())
    assert server.service.state.phase == "open"
    for _ in range(20):
        server.now += 1.0
        server.hear("strong-0", "progress", PROGRESS)
        server.hear("strong-0", "progress", PROGRESS)  # the inbox is never empty
        server.service.step()
    assert server.service.state.round is None, "the round should have ended at its deadline"


def test_words_of_devices_reach_no_terminal_as_they_are(flooded: Any) -> None:
    server = flooded(min_devices=2)
    server.hear("strong-0", "hello", hello(tier="\x1b[31mred"))
    escape = progress("\x1b[2Jtrain", tier="\x1b]0;x\x07")
    server.hear("strong-0", "progress", escape)
    server.hear("strong-0", "progress", msgspec.structs.replace(escape, stage="reported"))
    server.work()
    [seen] = server.seen(DeviceSeen)
    assert (seen.tier, seen.stage) == ("strong", " [2Jtrain")
    assert "reported" in server.seen(Rejected)[-1].text
    assert all("\x1b" not in str(event) for event in server.events if not isinstance(event, str))


def test_what_goes_over_a_devices_share_is_not_written(flooded: Any, tmp_path: Path) -> None:
    server = flooded(min_devices=2)
    speaker, mine = speaker_in(tmp_path / "device.key"), server.topics.device("strong-0")
    server.hear("strong-0", "hello", speaker.seal(mine.hello, hello()))
    server.work()
    before = server.service._registry._db.total_changes
    for number in range(1000):
        status = Status(online=bool(number % 2))
        server.hear("strong-0", "status", speaker.seal(mine.status, status))
    server.work()
    assert server.service.refused["messages too often"] > 700
    assert server.service._registry._db.total_changes - before < 300


def test_copies_of_messages_change_nothing(flooded: Any, tmp_path: Path, monkeypatch: Any) -> None:
    server = flooded(rounds=1)
    speaker, mine = speaker_in(tmp_path / "device.key"), server.topics.device("strong-0")
    said = {
        "status": speaker.seal(mine.status, Status(online=True)),
        "hello": speaker.seal(mine.hello, hello()),
        "progress": speaker.seal(mine.progress, PROGRESS),
    }
    for leaf, payload in said.items():
        server.hear("strong-0", leaf, payload)
    server.work()
    server.service.dispatch(Tick())
    assert server.service.state.phase == "open"
    sent: list[Any] = []
    monkeypatch.setattr(Announcements, "send_task", lambda _, *task, **__: sent.append(task))

    for _ in range(300):
        for leaf, payload in said.items():
            server.hear("strong-0", leaf, payload)
    server.work()

    assert not sent and set(server.service.refused) <= {"progress too often"}
    assert len(server.seen(DeviceSeen)) == 1
    server.hear("strong-0", "hello", speaker.seal(mine.hello, hello(samples=7)))
    server.work()
    assert server.service.state.devices["strong-0"].samples == 7 and len(sent) == 1


def test_forged_messages_cost_a_device_no_answer(flooded: Any, tmp_path: Path, monkeypatch: Any) -> None:
    server = flooded(rounds=2, min_devices=2, min_reports=2)
    said: list[Ack] = []
    publish = Session.publish

    def spy(session: Session, topic: str, payload: bytes, **options: Any) -> Any:
        if topic.endswith("/acks"):
            said.append(peek(Ack, payload))
        return publish(session, topic, payload, **options)

    monkeypatch.setattr(Session, "publish", spy)
    speaker, mine = speaker_in(tmp_path / "device.key"), server.topics.device("strong-0")
    server.hear("strong-0", "hello", speaker.seal(mine.hello, hello()))
    server.hear("strong-1", "hello", hello())
    server.work()
    server.service.dispatch(Tick())
    own = server.round.assignments["strong-0"]
    task = Task(run=server.service._rules.run, round=1, tier=own.tier, seed=own.seed, nonce=own.nonce)
    data = encode(update_for("strong-0", task, server.round.model_version, trained("strong-0", task)))
    [chunk] = chunks_of(data, own.nonce, 1 << 20)
    update = speaker.seal(mine.update(1, 0), chunk)
    server.hear("strong-0", "updates/1/0", update)
    server.work()
    assert said[-1].status == "accepted"

    for number in range(1000):
        server.hear("strong-0", "updates/1/0", bytes([0xDF, number % 256]))
        server.hear("strong-0", "updates/1/0", update[:-1] + bytes([update[-1] ^ 1]))
    server.work()
    said.clear()
    for _ in range(1000):
        server.hear("strong-0", "updates/1/0", update)
    server.work()
    assert {ack.status for ack in said} == {"accepted"} and len(said) < 100
    other = msgspec.structs.replace(chunk, sha256="0" * 64)
    server.hear("strong-0", "updates/1/0", speaker.seal(mine.update(1, 0), other))
    server.work()
    assert said[-1].reason == "other-update"


def test_a_device_whose_keys_were_revoked_is_away_at_once(flooded: Any, tmp_path: Path) -> None:
    server = flooded(min_devices=3)
    for name in ("strong-0", "strong-1"):
        speaker, mine = speaker_in(tmp_path / f"{name}.key"), server.topics.device(name)
        server.hear(name, "hello", speaker.seal(mine.hello, hello()))
    server.work()
    before = server.service.state
    assert server.service._handler.admit_known(before) == before
    server.service._registry.revoke("strong-1")
    server.hear("strong-0", "progress", b"not signed")
    server.hear("strong-1", "status", speaker.seal(mine.status, Status(online=True)))
    server.work()

    known = server.service.state.devices
    assert known["strong-0"].online and known["strong-1"] == roster.gone(known["strong-1"])
    assert [event.device for event in server.seen(DeviceLost)] == ["strong-1"]
    assert server.service._handler.admit_known(before).devices == known


def piece(nonce: str, index: int, **changes: Any) -> UpdateChunk:
    whole = {"nonce": nonce, "sha256": "0" * 64, "count": 3, "size": 3000, "data": bytes(1000), **changes}
    return UpdateChunk(index=index, **whole)


def test_copies_of_pieces_cost_a_device_nothing(federation: str, limits: Limits, tmp_path: Path) -> None:
    once = msgspec.structs.replace(limits, update_copies=1)
    server = Flooded(federation, once, tmp_path, rounds=1)
    server.hear("strong-0", "hello", hello())
    server.work()
    nonce = server.round.assignments["strong-0"].nonce
    for _ in range(500):
        server.hear("strong-0", "updates/1/0", piece(nonce, 0))
        server.hear("strong-0", "updates/1/2", piece(nonce, 2))
    server.work()
    assert not server.service.refused["updates too often"]
    assert server.service.refused["copies too often"] > 400
    for number in range(500):  # another one each time, never whole
        server.hear("strong-0", "updates/1/0", piece(nonce, 0, sha256=f"{number:064}"))
    server.work()
    assert server.service.refused["updates too often"] > 100
    assert server.service.held_bytes < 10_000


# -- a full disk -------------------------------------------------------------------------------------------------

FULL = "create trigger full before {what} begin select raise(abort, 'database or disk is full'); end"


@pytest.mark.parametrize(
    ("file", "what"),
    [
        *(("journal", f"insert on {table}") for table in ("updates", "rounds", "devices")),
        ("journal", "update on runs"),
        ("devices", "insert on keys"),
    ],
)
def test_a_full_disk_ends_nothing(
    device: MakeDevice, serve: Any, tmp_path: Path, file: str, what: str
) -> None:
    server, path = serve(rounds=1), tmp_path / "out" / f"{file}.sqlite"
    with sqlite3.connect(path, timeout=30) as database:
        database.execute(FULL.format(what=what))
    one = device("strong-0", seal=speaker_in(tmp_path / "device.key").seal if file == "devices" else unsigned)
    assert "disk is full" in server.wait_for(Warned).text
    if file == "journal":
        with sqlite3.connect(path, timeout=30) as database:
            database.execute("drop trigger full")
    if what == "insert on updates":  # it was not acknowledged, so a device sends it again
        one.report(one.tasks.get(timeout=PATIENCE_S), one.wait_open())
    assert server.wait_for(RoundClosed).reports == 1
    server.join()
