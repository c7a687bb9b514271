"""What the owner of a device lets it do, and when."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgefl_device.policy import ROUND_WORK, OwnerRules, SystemQueries, on_mains, read_policy, work_of
from tests.device_runtime.policies import ALL_HOLD, Facts, rules
from tests.support.errors import ConfigError, RoundDeclined, refuses


def at(patch: pytest.MonkeyPatch, text: str) -> None:
    moment = time.strptime(f"2026-05-04 {text}", "%Y-%m-%d %H:%M")
    fake = SimpleNamespace(localtime=lambda: moment, strftime=time.strftime)
    patch.setattr("edgefl_device.policy.time", fake)


def why(each: OwnerRules, work: Any = "train") -> str:
    with refuses(RoundDeclined, reason="policy") as declined:
        each.check(work)
    return declined.value.message


def test_a_device_without_a_policy_does_all_it_is_asked() -> None:
    rules().check("train")
    rules().check("profile")


def test_what_is_switched_off_is_declined_and_nothing_else() -> None:
    assert "profile is false" in why(rules(profile=False), "profile")
    rules(profile=False).check("train")
    assert "train is false" in why(rules(train=False))


def test_measuring_is_allowed_as_training_is_or_by_its_own_key() -> None:
    for work in ("evaluate", "statistics"):
        assert work_of(work) == work
        rules().check(work)
        assert "train is false" in why(rules(train=False), work)
        assert f"{work} is false" in why(rules(**{work: False}), work)
        rules(**{work: False}).check("train")
        rules(**{work: False}).check(*ROUND_WORK)
        rules(train=False, **{work: True}).check(work)
        assert "train is false" in why(rules(train=False, **{work: True}))
    assert work_of("") == work_of("opening") == "train"


@pytest.mark.parametrize(
    ("hours", "time_of_day", "quiet"),
    [
        ("22:00-07:00", "21:59", False),
        ("22:00-07:00", "22:00", True),
        ("22:00-07:00", "06:59", True),
        ("22:00-07:00", "07:00", False),
        ("09:00-17:30", "17:29", True),
        ("09:00-17:30", "08:59", False),
    ],
)
def test_quiet_hours_may_pass_midnight(
    monkeypatch: pytest.MonkeyPatch, hours: str, time_of_day: str, quiet: bool
) -> None:
    at(monkeypatch, time_of_day)
    each = rules(quiet=(hours,))
    if quiet:
        assert hours in why(each)
    else:
        each.check("train")


def test_the_bytes_of_a_day_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "12:00")
    rules(Facts(nbytes=(1 << 20) - 1), bytes_a_day="1MiB").check("train")
    used = Facts(nbytes=1 << 20)
    assert "of 1.0 MiB" in why(rules(used, bytes_a_day="1MiB"))
    assert used.days == ["2026-05-04"]


def test_an_unknown_condition_does_not_hold() -> None:
    required = {"charging": True, "unmetered": True}
    assert "not charging" in why(rules(Facts(ALL_HOLD | {"charging": False}), **required))
    assert "unknown whether it is unmetered" in why(rules(Facts({"charging": True}), **required))


def test_a_command_is_asked_before_the_system() -> None:
    def command(code: int) -> tuple[str, ...]:
        return (sys.executable, "-c", f"raise SystemExit({code})")

    queries = SystemQueries({"unmetered": command(0), "charging": command(1)})
    assert queries.holds("unmetered") is True and queries.holds("charging") is False
    assert SystemQueries({"unmetered": ("/no/such/command",)}).holds("unmetered") is None
    assert SystemQueries().holds("unmetered") is None


@pytest.mark.parametrize(
    ("supplies", "mains"),
    [
        ({}, True),
        ({"BAT0": ("Battery", "Discharging")}, False),
        ({"BAT0": ("Battery", "Charging")}, True),
        ({"AC": ("Mains", "1"), "BAT0": ("Battery", "Not charging")}, True),
        ({"AC": ("Mains", "0"), "BAT0": ("Battery", "Discharging")}, False),
    ],
)
def test_mains_power_as_linux_tells_it(tmp_path: Path, supplies: Any, mains: bool) -> None:
    for name, (kind, state) in supplies.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(kind + "\n")
        (tmp_path / name / ("status" if kind == "Battery" else "online")).write_text(state + "\n")
    assert on_mains(tmp_path) is mains
    assert on_mains(tmp_path / "nowhere") is None


def test_a_file_is_read_and_each_mistake_named(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(
        'quiet = ["22:00-07:00"]\nbytes_a_day = "200MiB"\nduty = 0.5\n[commands]\nunmetered = ["yes"]\n'
    )
    policy = read_policy(file)
    assert (policy.most_bytes, policy.hours, policy.duty) == (200 << 20, ((1320, 420),), 0.5)
    for wrong, named in (
        ("night = true", "night"),
        ('quiet = ["22-7"]', "22-7"),
        ("duty = 0.0", "duty"),
        ('bytes_a_day = "much"', "much"),
        ("[commands]\nsunny = []", "sunny"),
        ("train = ", "policy.toml"),
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=named):
            read_policy(file)
    with refuses(ConfigError, path=str(tmp_path / "nowhere.toml")):
        read_policy(tmp_path / "nowhere.toml")
