"""In what conditions a device is: as Linux, its owner's commands and its policy say."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.mqtt.messages import LINK, POWER, THERMAL, Conditions
from edgefl_device.policy import (
    ConditionsMonitor,
    ConditionsSensor,
    command_output,
    heat,
    not_metered,
    parse_conditions,
)
from tests.device_runtime.policies import ALL_HOLD, Facts, rules

WAIT_S = 300.0


def printing(text: str, code: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; sys.stdout.write({text!r}); sys.exit({code})")


def read(zones: Path, facts: Mapping[str, bool | None] | None = None, **policy: Any) -> Conditions:
    return ConditionsSensor(rules(Facts(facts or {}), **policy), zones).read()


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
def test_heat_is_told(tmp_path: Path, degrees: float, trips: dict[str, float], expected: str) -> None:
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
    assert all(word in known[name] for name, word in parse_conditions(text).items())
    assert (
        parse_conditions(f'power = battery\n{text.replace("power", "")}\nthermal="hot"')["power"] == "battery"
    )


def test_a_command_that_fails_or_is_not_there_says_nothing() -> None:
    assert command_output(printing("power = battery")) == "power = battery"
    assert command_output(printing("power = battery", 1)) == ""
    assert command_output(("/no/such/command",)) == ""


def test_the_owner_s_words_come_before_the_system_s(tmp_path: Path) -> None:
    zone(tmp_path, 0, 20, passive=85)
    unknown = read(tmp_path / "nowhere")
    assert unknown == Conditions(available=True)
    system = read(tmp_path, {"charging": True, "unmetered": False})
    assert system == Conditions(power="charging", link="metered", thermal="cool", available=True)
    owner = read(tmp_path, ALL_HOLD, surroundings=printing("power=battery\nthermal=hot\nfan=on"))
    assert owner == Conditions(power="battery", link="unmetered", thermal="hot", available=True)


def test_a_device_is_available_when_its_policy_would_take_a_round(tmp_path: Path) -> None:
    assert read(tmp_path, train=False).available is False
    assert read(tmp_path, charging=True).available is False, "nobody knows"
    assert read(tmp_path, ALL_HOLD, charging=True).available is True
    told = printing("power = charging")
    assert (
        read(tmp_path, {"charging": False, "unmetered": False}, charging=True, surroundings=told).available
        is True
    )
    assert read(tmp_path, surroundings=printing("available = no")).available is False


class SlowSensor(ConditionsSensor):
    """Waits for the test; the first reading is another than the others."""

    def __init__(self) -> None:
        super().__init__(rules())
        self.readings = 0
        self.go = threading.Event()

    def read(self) -> Conditions:
        self.readings += 1
        self.go.wait(WAIT_S)
        return Conditions(power="charging" if self.readings == 1 else "battery")


class WokenSession:
    """A session that notes when its reader is woken."""

    def __init__(self) -> None:
        self.woken = threading.Event()

    def wake(self) -> None:
        self.woken.set()


def test_changes_are_reported_once_and_readings_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sensor, session = [0.0], SlowSensor(), WokenSession()
    monkeypatch.setattr("edgefl_device.policy.time", SimpleNamespace(monotonic=lambda: now[0]))
    monitor = ConditionsMonitor(sensor, 10.0, session)  # type: ignore[arg-type]
    sensor.go.set()
    monitor.begin()
    assert not monitor.step() and monitor.take() == Conditions(power="charging")
    session.woken.clear()
    sensor.go.clear()
    now[0] = 10.0
    assert not monitor.step()
    now[0] = 25.0
    assert not monitor.step() and sensor.readings == 2, "the second reading is not over"
    sensor.go.set()
    assert session.woken.wait(WAIT_S)
    assert monitor.step() and monitor.take() == Conditions(power="battery")
