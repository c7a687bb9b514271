"""An operator's orders to a running server: pause, drain, roll back."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from edgefl.simulator.replay import Replay
from edgefl.wire.mqtt.messages import Task
from edgefl_server.events import Event, Finished, Ordered, RoundClosed, RoundOpened, Started, Stopped
from edgefl_server.operations import Drain, Mailbox, Order, Pause, Resume, RollBack, read
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.update_storage import UpdateFiles
from tests.server.fleet import WEIGHTS, MakeDevice, MakePlan, RunningServer, ScriptedDevice, Serve, silent


@pytest.fixture
def box(tmp_path: Path) -> Mailbox:
    return Mailbox(tmp_path / "out")


def carried_out(server: RunningServer, box: Mailbox, order: Order) -> Ordered:
    box.send(order)  # type: ignore[arg-type]
    ordered: Ordered = server.wait_for(Ordered)
    assert ordered.order == order.name
    return ordered


def left(server: RunningServer, box: Mailbox, order: Order) -> None:
    """An order that waits for the end of the round, and which the server has seen."""
    box.send(order)  # type: ignore[arg-type]
    while not server.service.state.held:
        assert server.error is None


def report(device: ScriptedDevice, number: int) -> str:
    """The device's update for that round; the version of the model that it began with."""
    opened = device.wait_open(number)
    device.report(task_of(device, number), opened)
    return opened.model_version


def task_of(device: ScriptedDevice, number: int) -> Task:
    """The device's task in that round."""
    task = device.tasks.get(timeout=50)
    while task.round != number:
        task = device.tasks.get(timeout=50)
    return task


def order_of(server: RunningServer, *kinds: type[Event]) -> list[str]:
    seen = [event for event in server.seen_of(Event) if isinstance(event, kinds)]
    return [getattr(event, "order", "") or f"round {event.round}" for event in seen]  # type: ignore[attr-defined]


def test_a_pause_holds_over_a_restart(device: MakeDevice, serve: Serve, box: Mailbox) -> None:
    phone = device("strong-0", silent)
    server = serve(rounds=2)
    server.wait_for(RoundOpened)
    assert carried_out(server, box, Pause(by="10.0.0.1")).by == "10.0.0.1"
    report(phone, 1)
    server.wait_for(RoundClosed)
    server.stop()
    assert server.seen_of(RoundOpened)[-1].round == 1

    again = serve(rounds=2)
    again.wait_for(Started)
    assert again.service.state.held and box.paused
    carried_out(again, box, Resume())
    again.wait_for(RoundOpened)
    report(phone, 2)
    again.join()

    assert order_of(again, Ordered, RoundOpened) == ["resume", "round 2"]
    assert not box.paused and list(box.waiting()) == []


def test_a_drain_lets_the_open_round_end(device: MakeDevice, serve: Serve, box: Mailbox) -> None:
    phone = device("strong-0", silent)
    server = serve(rounds=2)
    server.wait_for(RoundOpened)
    left(server, box, Drain())
    report(phone, 1)
    server.join()

    assert server.seen_of(Ordered)[-1].done
    assert [event.next_round for event in server.seen_of(Stopped)] == [2]
    again = serve(rounds=2)
    report(phone, 2)
    again.join()
    assert len(again.seen_of(Finished)) == 1


def test_a_model_is_rolled_back_between_rounds_and_stays_so(
    device: MakeDevice, serve: Serve, box: Mailbox, federation: str, tmp_path: Path
) -> None:
    phone = device("strong-0", silent)
    server = serve(rounds=4)
    began = [report(phone, 1), report(phone, 2)]
    server.wait_for(RoundOpened, lambda event: event.round == 3)
    left(server, box, RollBack(version=1, by="operator"))
    began.append(report(phone, 3))
    ordered = server.wait_for(Ordered)
    server.wait_for(RoundOpened, lambda event: event.round == 4)
    phone.wait_open(4)
    server.stop()

    assert (ordered.done, ordered.version) == (True, 1)
    again = serve(rounds=4)
    began.append(report(phone, 4))
    again.join()
    assert began[3] == began[1] and len({began[0], began[1], began[2]}) == 3
    with closing(
        Journal(
            f"sqlite:///{tmp_path / 'out' / 'journal.sqlite'}",
            federation,
            UpdateFiles(tmp_path / "out" / "updates"),
        )
    ) as journal:
        run = journal.latest_run()
        assert run is not None
        told = journal.outcomes(run.run)
    assert [state for _, state, _ in told] == ["closed", "abandoned", "abandoned", "closed"]
    assert told[1][2]["text"] == "undone: an operator took the model back to round 1"
    assert told[2][2]["weights_sha256"] == told[0][2]["weights_sha256"] != told[3][2]["weights_sha256"]


def test_a_run_that_was_rolled_back_is_repeated_to_the_same_bits(
    device: MakeDevice, serve: Serve, plan_of: MakePlan, box: Mailbox, tmp_path: Path
) -> None:
    """Over a round that was closed, and one that was abandoned by itself."""
    phone = device("strong-0", silent)
    plan = replace(plan_of(rounds=4), keep_updates=True)
    server = serve(plan)
    report(phone, 1)
    report(phone, 2)
    opened, task = phone.wait_open(3), task_of(phone, 3)
    left(server, box, RollBack(version=1))
    phone.report(task, opened, samples=-1, tier="another")  # which is refused
    assert server.wait_for(Ordered).done
    report(phone, 4)
    server.join()

    url = f"sqlite:///{tmp_path / 'out' / 'journal.sqlite'}"
    with closing(Journal(url, plan.federation, UpdateFiles(tmp_path / "out" / "updates"))) as journal:
        run = journal.latest_run()
        assert run is not None
        repeated = list(Replay(plan, journal, run, WEIGHTS, tmp_path / "again", "cpu").rounds())
    assert [each.outcome for each in repeated] == ["closed", "abandoned", "abandoned", "closed"]
    assert [each.round for each in repeated if not each.same] == []


def test_a_version_that_does_not_exist_is_refused(device: MakeDevice, serve: Serve, box: Mailbox) -> None:
    phone = device("strong-0", silent)
    server = serve(rounds=6)
    server.wait_for(RoundOpened)
    for number in range(1, 6):
        report(phone, number)
        server.wait_for(RoundOpened, lambda event, after=number: event.round == after + 1)

    gone = carried_out(server, box, RollBack(version=1))
    same = carried_out(server, box, RollBack(version=5))
    never = carried_out(server, box, RollBack(version=-3))

    assert not (gone.done or same.done or never.done)
    assert "is not kept any more" in gone.text and "name an earlier one" in same.text
    report(phone, 6)
    server.join()


def test_a_whole_algorithm_is_not_rolled_back(device: MakeDevice, serve: Serve, box: Mailbox) -> None:
    device("strong-0", silent)
    server = serve(rounds=3, whole=True)
    server.wait_for(RoundOpened)

    refused = carried_out(server, box, RollBack(version=0))

    assert not refused.done and "every device in every round" in refused.text


def test_a_waiting_order_precedes_every_round(device: MakeDevice, serve: Serve, box: Mailbox) -> None:
    phone = device("strong-0", silent)
    first = serve(rounds=3)
    began = [report(phone, 1)]
    first.wait_for(RoundClosed)
    carried_out(first, box, Pause())
    began.append(report(phone, 2))
    first.wait_for(RoundClosed)
    first.stop()
    box.send(RollBack(version=1))
    box.send(Resume())

    second = serve(rounds=3)
    began.append(report(phone, 3))
    second.join()

    assert began[2] == began[1] != began[0]
    assert order_of(second, Ordered, RoundOpened) == ["resume", "rollback", "round 3"]


def test_a_bad_order_is_thrown_away(device: MakeDevice, serve: Serve, box: Mailbox, tmp_path: Path) -> None:
    server = serve(rounds=1)
    server.wait_for(Started)
    folder = tmp_path / "out" / "orders"
    folder.mkdir()
    (folder / "1.json").write_bytes(b'{"order":"explode"}')

    ordered = server.wait_for(Ordered)

    assert (ordered.done, ordered.text) == (False, "it cannot be read")
    server.stop()
    assert list(folder.iterdir()) == []


def test_an_order_is_json() -> None:
    assert read(b'{"order":"rollback","version":3,"more":1}') == RollBack(version=3)
    for bad in (b"", b"{}", b'{"order":"rollback"}', b'{"order":"rollback","version":"x"}', b"\xff"):
        with pytest.raises(ValueError):
            read(bad)


@pytest.mark.parametrize(("order", "name"), [(Pause(), "pause"), (Resume(), "resume")])
def test_an_order_that_cannot_be_written_is_refused(
    device: MakeDevice, serve: Serve, box: Mailbox, tmp_path: Path, order: Order, name: str
) -> None:
    phone = device("strong-0", silent)
    (tmp_path / "out" / "orders" / "paused").mkdir(parents=True)  # as a disk that takes nothing
    server = serve(rounds=1)
    refused = carried_out(server, box, order)
    assert (refused.done, refused.order) == (False, name) and "cannot be written" in refused.text
    (tmp_path / "out" / "orders" / "paused").rmdir()
    assert carried_out(server, box, Resume()).done
    report(phone, 1)
    server.join()
