"""What is told once in a while."""

from __future__ import annotations

from edgefl_device.link.notices import Notices


def test_a_thing_is_due_once_in_a_while_and_the_rest_is_counted() -> None:
    now = [0.0]
    notices = Notices(5.0, lambda: now[0])

    assert [notices.due("a"), notices.due("a"), notices.due("b")] == [True, False, True]
    now[0] = 4.9
    assert not notices.due("a")
    now[0] = 5.0
    assert notices.due("a")
    assert notices.hushed == 2


def test_the_things_that_are_remembered_are_few() -> None:
    notices = Notices(5.0, lambda: 0.0)

    for number in range(10_000):
        assert notices.due(number)
    assert len(notices._again_at) < 1000
