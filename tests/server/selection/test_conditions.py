"""Which devices a service selects, over a real broker: by the conditions that they tell, and fairly, restarts included."""

from __future__ import annotations

from typing import Any

from edgefl.wire.mqtt.messages import Conditions, Hello
from edgefl_server.coordinator.eligibility import SelectionRules
from edgefl_server.coordinator.record import Turnout
from edgefl_server.events import DeviceFitness, DeviceJoined, RoundClosed, RoundOpened, Waiting
from tests.server.fleet import PATIENCE_S, MakeDevice, ScriptedDevice, silent


def tell(device: ScriptedDevice, conditions: Conditions) -> None:
    device.say(
        device.mine.hello,
        Hello(agent="a", memory_bytes=1 << 30, cores=1, samples=10, engines={}, conditions=conditions),
        retain=True,
    )


def test_a_device_takes_part_from_when_it_says_that_it_charges(device: MakeDevice, serve: Any) -> None:
    first = device("strong-0", silent, conditions=Conditions(power="charging"))
    device("strong-1", conditions=Conditions(power="battery"))
    third = device("strong-2", silent)  # says nothing of it
    rules = {"rounds": 2, "selection": SelectionRules(power="charging")}
    server = serve(**rules)
    server.wait_for(DeviceJoined, lambda event: event.device == "strong-2")  # its first hello is behind it
    opened = (server.seen_of(RoundOpened) or [server.wait_for(RoundOpened)])[0]
    assert opened.devices == ("strong-0",)
    tell(third, Conditions(power="charging", thermal="hot"))
    told = server.wait_for(DeviceFitness, lambda event: event.device == "strong-2" and not event.unfit)
    assert told.tier == "strong"
    server.stop()

    again = serve(**rules)  # what they said last is in the journal
    task = first.tasks.get(timeout=PATIENCE_S)
    first.report(task, first.wait_open())
    opened = again.wait_for(RoundOpened, lambda event: event.round == 2)
    assert opened.devices == ("strong-0", "strong-2")
    again.stop()


def test_those_that_were_idle_longest_are_next_also_after_a_restart(device: MakeDevice, serve: Any) -> None:
    for n in range(4):
        device(f"strong-{n}")
    rules = {
        "rounds": 4,
        "min_devices": 4,
        "fraction": 0.5,
        "selection": SelectionRules(policy="longest-idle"),
    }
    first = serve(**rules)
    seen = [first.wait_for(RoundOpened).devices]
    first.wait_for(RoundClosed)
    first.stop()
    record = first.service.state.record

    second = serve(**rules)
    taken_up = second.service.state.record if not second.seen_of(RoundOpened) else None
    closed = [second.wait_for(RoundClosed, lambda event, n=n: event.round == n) for n in range(2, 5)]
    second.join()
    opened = {
        event.round: event.devices for event in [*first.seen_of(RoundOpened), *second.seen_of(RoundOpened)]
    }
    everyone = {f"strong-{n}" for n in range(4)}
    assert {*opened[1], *opened[2]} == {*opened[3], *opened[4]} == everyone and seen == [opened[1]]
    assert [each.fairness for each in closed] == [1.0, 0.9, 1.0]
    assert record.turnouts[0] == {"strong": Turnout(2, 0)}
    assert taken_up is None or taken_up.of == record.of


def test_who_waits_is_told_why(device: MakeDevice, serve: Any) -> None:
    device("strong-0", conditions=Conditions(link="metered"))
    server = serve(selection=SelectionRules(link="unmetered"))
    assert "1 more are online" in server.wait_for(Waiting, lambda event: event.reason != "").reason
    server.stop()
