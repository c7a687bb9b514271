"""What devices and tasks carry along is what counting them anew gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgefl_server.coordinator.fleet import Assignment, Assignments, Devices, Status
from edgefl_server.coordinator.roster import RosterEntry

NAMES = st.sampled_from("abcdef")
STATUSES = st.sampled_from(("open", "accepted", "rejected", "declined"))
DEVICES = st.builds(
    RosterEntry,
    NAMES,
    st.sampled_from(("", "strong")),
    st.integers(0, 9),
    st.booleans(),
    st.floats(0, 9),
    unfit=st.sampled_from(("", "it is hot")),
)


@given(st.lists(DEVICES), st.lists(DEVICES), st.floats(0, 20), st.floats(0, 9))
def test_devices_are_counted(
    before: list[RosterEntry], changes: list[RosterEntry], now: float, grace_s: float
) -> None:
    by_name = {device.name: device for device in before}
    devices = Devices(by_name)
    for device in changes:
        if device.samples:
            by_name[device.name] = device
            devices = devices.with_device(device)
        else:
            by_name.pop(device.name, None)
            devices = devices.without(device.name)

    assert dict(devices) == by_name and len(devices) == len(by_name)
    assert devices.here(now, grace_s) == sum(each.eligible(now, grace_s) for each in by_name.values())
    assert devices.members == sum(bool(each.tier) for each in by_name.values())
    assert devices.left_out == sum(
        bool(each.tier and each.unfit) and each.online for each in by_name.values()
    )
    assert dict(devices.away) == {name: each for name, each in by_name.items() if not each.online}
    assert devices == Devices(by_name)


@given(st.dictionaries(NAMES, STATUSES), st.lists(st.tuples(NAMES, STATUSES)))
def test_a_task_is_answered_once(before: dict[str, Status], answers: list[tuple[str, Status]]) -> None:
    tasks = {name: Assignment(name, "strong", 1, "n", status=status) for name, status in before.items()}
    assigned, expected = Assignments(tasks), dict(before)
    for name, status in answers:
        kept, assigned = assigned, assigned.with_answer(name, status, "why")
        if expected.get(name) == "open":
            expected[name] = status
        else:
            assert assigned is kept

    assert {name: task.status for name, task in assigned.items()} == expected
    assert list(assigned) == sorted(expected)
    assert set(assigned.open) == {name for name, status in expected.items() if status == "open"}
    for status in ("open", "accepted", "rejected", "declined"):
        assert assigned.count(status) == list(expected.values()).count(status)
