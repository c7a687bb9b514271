"""In what conditions a device is: as Linux, its owner's commands and its policy say."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.mqtt.messages import LINK, POWER, THERMAL, Conditions
from edgefl_device.conditions import Look, Watch, heat, words
from edgefl_device.policy import Policy, Rules, not_metered, output_of

WAIT_S = 300.0


def printing(text: str, code: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; sys.stdout.write({text!r}); sys.exit({code})")


def look(zones: Path, ask: Any = lambda _: None, **policy: Any) -> Conditions:
    return Look(Rules(Policy(**policy), ask, lambda _: 0), zones)()


def zone(folder: Path, number: int, degrees: float, **trips: float) -> None:
    made = folder / f"thermal_zone{number}"
    made.mkdir()
    (made / "temp").write_text(f"{int(1000 * degrees)}\n")
    for n, (kind, limit) in enumerate(trips.items()):
        (made / f"trip_point_{n}_type").write_text(kind + "\n")
        (made / f"trip_point_{n}_temp").write_text(f"{int(1000 * limit)}\n")


@pytest.mark.parametrize(
    ("degrees", "trips", "expected"),
    [
        (60, {"passive": 85}, "cool"),
        (76, {"passive": 85}, "warm"),
        (85, {"passive": 85, "critical": 110}, "hot"),
        (79, {"critical": 110}, "cool"),
        (80, {"critical": 110}, "warm"),
        (90, {"critical": 110}, "hot"),
        (90, {"active": 50}, ""),
        (90, {"passive": -274}, ""),
        (90, {}, ""),
    ],
)
def test_heat_is_told_beside_where_the_system_slows_down(
    tmp_path: Path, degrees: float, trips: dict[str, float], expected: str
) -> None:
    zone(tmp_path, 0, degrees, **trips)
    assert heat(tmp_path) == expected


def test_the_hottest_part_counts_and_what_cannot_be_read_does_not(tmp_path: Path) -> None:
    zone(tmp_path, 0, 20, passive=85)
    zone(tmp_path, 1, 80, passive=85)
    zone(tmp_path, 2, 99, passive=85)
    (tmp_path / "thermal_zone2" / "temp").write_text("N/A")
    assert heat(tmp_path) == "warm"
    assert heat(tmp_path / "nowhere") == ""


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("u 0", None),
        ("u 1", False),
        ("u 2", True),
        ("u 3", False),
        ("u 4\n", True),
        ("", None),
        ("s 1", None),
    ],
)
def test_a_link_costs_as_network_manager_has_it(told: str, expected: bool | None) -> None:
    assert not_metered(told) is expected


@given(st.text(max_size=200))
def test_of_what_a_command_prints_only_known_words_are_taken(text: str) -> None:
    known = {"power": POWER, "link": LINK, "thermal": THERMAL, "available": ("yes", "no")}
    assert all(word in known[name] for name, word in words(text).items())
    assert words(f'power = battery\n{text.replace("power", "")}\nthermal="hot"')["power"] == "battery"


def test_a_command_that_fails_or_is_not_there_says_nothing() -> None:
    assert output_of(printing("power = battery")) == "power = battery"
    assert output_of(printing("power = battery", 1)) == ""
    assert output_of(("/no/such/command",)) == ""


def test_the_owner_s_words_come_before_the_system_s(tmp_path: Path) -> None:
    zone(tmp_path, 0, 20, passive=85)
    unknown = look(tmp_path / "nowhere")
    assert unknown == Conditions(available=True)
    system = look(tmp_path, {"charging": True, "unmetered": False}.get)
    assert system == Conditions(power="charging", link="metered", thermal="cool", available=True)
    owner = look(tmp_path, lambda _: True, surroundings=printing("power=battery\nthermal=hot\nfan=on"))
    assert owner == Conditions(power="battery", link="unmetered", thermal="hot", available=True)


def test_a_device_is_available_when_its_policy_would_take_a_round(tmp_path: Path) -> None:
    assert look(tmp_path, train=False).available is False
    assert look(tmp_path, charging=True).available is False, "nobody knows"
    assert look(tmp_path, lambda _: True, charging=True).available is True
    told = printing("power = charging")
    assert look(tmp_path, lambda _: False, charging=True, surroundings=told).available is True
    assert look(tmp_path, surroundings=printing("available = no")).available is False


def test_what_changes_is_told_once_and_no_look_is_made_beside_another() -> None:
    now, looks, go, woken = [0.0], [0], threading.Event(), threading.Event()

    def slow() -> Conditions:
        looks[0] += 1
        go.wait(WAIT_S)
        return Conditions(power="charging" if looks[0] == 1 else "battery")

    watch = Watch(slow, 10.0, woken.set, lambda: now[0])
    go.set()
    watch.begin()
    assert not watch.step() and watch.tell() == Conditions(power="charging")
    woken.clear()
    go.clear()
    now[0] = 10.0
    assert not watch.step()
    now[0] = 25.0
    assert not watch.step() and looks == [2], "the second look is not over"
    go.set()
    assert woken.wait(WAIT_S)
    assert watch.step() and watch.tell() == Conditions(power="battery")
