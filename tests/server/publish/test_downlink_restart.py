"""What the downlink publishes survives a killed server, bit for bit, and nothing of another run is taken up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.publish.published import Device, Server, believed, model, same, units


@pytest.mark.parametrize("killed_after", range(7))
@pytest.mark.parametrize(
    ("frozen", "options"),
    [("", {}), *(("stem", {"every": every, "compression": "none"}) for every in (1, 3))],
    ids=["moving", "frozen-1", "frozen-3"],
)
def test_a_server_killed_between_keyframes_publishes_the_same(
    tmp_path: Path, killed_after: int, frozen: str, options: Any
) -> None:
    """Also of a unit that keeps its bytes over a keyframe."""
    calm, killed = (Server(tmp_path / name, **options) for name in ("calm", "killed"))
    for number in range(9):
        parts = {unit: units(0 if unit == frozen else number)[unit] for unit in ("stem", "head")}
        calm.publish(number, parts)
        killed.publish(number, parts)
        if number == killed_after:
            before = {sha: killed.publisher.encoded(sha) for sha in killed.publisher.live}
            killed = Server(tmp_path / "killed", **options)
            killed.resume(number, parts)
            assert {sha: killed.publisher.encoded(sha) for sha in killed.publisher.live} == before
        assert killed.announced(number) == calm.announced(number)
        assert same(believed(killed), believed(calm))


def test_a_server_killed_before_the_journal_publishes_the_same(tmp_path: Path) -> None:
    calm, killed = Server(tmp_path / "calm"), Server(tmp_path / "killed")
    for number in range(9):
        calm.publish(number)
        killed.publish(number)
        if number:
            killed = killed.again()
            killed.resume(number - 1)
            killed.publish(number)
            killed.forget_old()
    assert killed.announced(8) == calm.announced(8)


@pytest.mark.parametrize("damage", ["lost", "half"])
def test_a_server_that_lost_its_record_begins_with_a_keyframe(tmp_path: Path, damage: str) -> None:
    server = Server(tmp_path)
    for number in range(3):
        server.publish(number)
    for file in (tmp_path / "published").iterdir():
        if damage == "lost":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:500])
    again = server.again()
    again.resume(2)
    assert again.patched == {} and same(Device().read(again, 2), model(2))


def test_records_that_nobody_needs_any_more_go(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for number in range(15):
        server.publish(number)
    assert {file.stem for file in (tmp_path / "published").iterdir()} == {
        "round-0012",
        "round-0013",
        "round-0014",
    }


def test_a_unit_that_did_not_change_gets_no_patch(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for number in range(3):
        server.publish(number, {**units(number), "stem": units(0)["stem"]})
    assert set(server.downlink.units) == {"stem", "head"} and set(server.patched) == {"head"}
    assert len(server.patched["head"]) == 3


def test_what_another_run_published_in_the_folder_is_not_taken_up(tmp_path: Path) -> None:
    for number in range(3):
        Server(tmp_path, run="old").publish(number)
    other = Server(tmp_path, run="new")
    other.resume(2, units(7))
    assert same(Device().read(other, 2), {n: a for part in units(7).values() for n, a in part.arrays.items()})
    kept = [file.name for file in (tmp_path / "published").iterdir()]
    assert kept == ["round-0002.msgpack"], "a new run leaves nothing of the old one behind"


def test_what_was_published_of_another_model_is_not_taken_up(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.publish(0)
    again = server.again()
    again.downlink.resume(0, "another", units(7))
    assert same(Device().read(again, 0), {n: a for part in units(7).values() for n, a in part.arrays.items()})
